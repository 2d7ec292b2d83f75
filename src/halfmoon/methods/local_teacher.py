"""A client with a mean teacher of its own, which stays with it from round to round: RSCFed's and FedIRM's.

memory: the teacher's parameters and steps, and what `ClientUpdate` remembers.
"""

import torch

from halfmoon.api.types import ClientUpdate, Local, Passes
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree

TEACHER = ("teacher", "teacher_steps")


class TeacherClient(ClientUpdate):
    """The teacher's way through memory and carry; a step lets it `follow` (`objectives.base`)."""

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        steps = torch.tensor(-1.0, dtype=torch.float64, device=next(tree.leaves(down["params"])).device)
        return {"teacher": down["params"], "teacher_steps": steps, **super().remember(down, generator)}

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        return {**super().begin(down, memory, data), **{name: memory[name] for name in TEACHER}}

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        up, memory = super().finish(down, carry, data)
        return up, {**memory, **{name: carry[name] for name in TEACHER}}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)
