"""FedRGD, also SSFL (Zhang et al., IEEE BigData 2021): FixMatch at the clients, and averages of random groups.

The round's clients fall into `groups` groups at random. Each group is averaged by itself, with plain means, and the
means are averaged:

    w_s = (w_server,s + sum_{k in s} w_k) / (|s| + 1),    w = (1/S) sum_s w_s.

w_server,s is a copy of the server's model that it trains on its own labels in the same round, one for each group. Where
the labels lie at the clients there is no such copy, and w_s = mean_{k in s} w_k. The third ingredient is GroupNorm in
place of batch normalization: that is the network's `norm` = "group", which a configuration has to set.

server: params, stats and tensors of the objective; with `return_group` also groups, leaves (S, ...).  broadcast:
params, stats and tensors of the objective, of the mean or of the client's group.  memory: with `keep_optimizer`, the
optimizer's state.  upload: the trained broadcast.

With labels at clients, groups of equal size and one model for all, this is FedAvg with equal weights. What is then
left of the method is GroupNorm, and, in the authors' code, that users go on from their group's mean while only server
copies see the mean over groups: `return_group`. The default is the plain reading that the tables of later papers need;
their own code for labels at clients does not run as it was published. Theirs is a few clients that are always there;
where a cohort is drawn, "their group's mean" goes to the group that a client falls into next. Further departures:
- Groups follow a hash of round and client: the same for every seed, for a method draws no random number.
- Batch-normalization statistics, which GroupNorm does not have, are averaged like parameters.
- Momentum survives the averaging there; here it does with `keep_optimizer`.

SemiFL's tables have a version of their own, which is that method's loop with the weights of two groups:
`halfmoon.methods.semifl`, `server_share`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import ALL_LABEL_LOCATIONS, Requirements
from halfmoon.api.types import ClientUpdate, Federation, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import check_minimum
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import FixMatch, Supervised
from halfmoon.methods.objectives.pseudo_labeling import refuse_average_teacher


@dataclass(frozen=True)
class FedRGD:
    """FedRGD around FixMatch, with `groups` random groups (the paper: 2 for 10 or 20 clients, 3 for 30, 5 for 47).

    `return_group`: whether a client starts from the mean of the group that it falls into, or from the mean over groups.
    `keep_optimizer`: whether a client's momentum lives on between its rounds; a copy at the server begins afresh.
    Raises `UserError` without a group, or for an average of the server's models as teacher: there are groups' means.
    """

    objective: FixMatch = field(default_factory=FixMatch)
    groups: int = 2
    return_group: bool = False
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        check_minimum(self, 1, "groups")
        refuse_average_teacher("FedRGD", self.objective)

    def requirements(self, norm: str) -> Requirements:
        return Requirements(
            reason="it averages in groups, and a group may be one client", label_locations=ALL_LABEL_LOCATIONS
        )

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            "train": LocalTraining(task, self.objective, keep_optimizer=self.keep_optimizer),
            "serve": LocalTraining(task, Supervised(decay=self.objective.decay)),
        }

    def start(self, task: Task, model: Tree) -> Tree:
        model = self.objective.start(task, model)
        return {**model, "groups": tree.stack([model] * self.groups)} if self.return_group else model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort and a copy of the server's model for each group train, and average twice."""
        model: Tree = {"stats": {}, **{name: part for name, part in server.items() if name != "groups"}}
        group = grouped(to_ints(federation.cohort), task.round, self.groups)
        if self.return_group:
            starts: Tree = {"stats": {}, **server["groups"]}
            mine = torch.tensor([group[k] for k in to_ints(federation.cohort)])
            upload = federation.query("train", {}, tree.map(lambda leaf: leaf[mine], starts))
        else:
            starts = tree.stack([model] * self.groups)
            upload = federation.query("train", model)
        answered = [group[k] for k in to_ints(federation.responders)]
        means: list[Tree] = []
        for number in range(self.groups):
            members = [tree.index(upload.update, place) for place, own in enumerate(answered) if own == number]
            if federation.labeled:
                members.append(federation.query_server("serve", model).update)
            means.append(mean([{name: each[name] for name in model} for each in members]))
        there = [each for each in means if each]
        new = mean(there)
        if not self.return_group:
            return new
        # A group that nobody answered from goes on where it was.
        return {**new, "groups": tree.stack([each or tree.index(starts, s) for s, each in enumerate(means)])}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.objective.solution({"stats": {}, **server})


def grouped(cohort: Sequence[int], round: int, groups: int) -> dict[int, int]:
    """Return the group of each client: by turns in the order of their hashes, so that sizes differ by one at most."""
    order = sorted(cohort, key=lambda client: rng.derive_seed(0, "fedrgd", round, client))
    return {client: place % groups for place, client in enumerate(order)}


def mean(trees: Sequence[Tree]) -> Tree:
    """Return the plain mean of trees, {} of none."""
    return tree.weighted_mean(tree.stack(trees), torch.ones(len(trees))) if trees else {}


ROWS = (
    MethodEntry("fedrgd", "FedRGD", "FedRGD (SSFL), IEEE BigData 2021",
                "FixMatch, averaged in random groups; meant for norm = 'group'", FedRGD()),
    MethodEntry("fedrgd-feddpl", "FedRGD + FedDPL", "FedRGD (SSFL), IEEE BigData 2021; FedDB, IJCAI 2024",
                "FedRGD with guesses divided by each client's mean prediction; meant for norm = 'group'",
                FedRGD(FixMatch(debias=True))),
)  # fmt: skip
