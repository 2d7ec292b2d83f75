"""FedRGD, also SSFL (Zhang et al., IEEE BigData 2021): FixMatch at the clients, and averages of random groups.

The round's clients are divided into `groups` random groups. Each group is averaged with equal weights, and the groups'
means are averaged:

    w_s = (w_server,s + sum_{k in s} w_k) / (|s| + 1),    w = (1/S) sum_s w_s.

w_server,s is a copy of the server's model that the server trains on its labels in the same round, one for each group.
With labels at the clients there is no such copy, and w_s = mean_{k in s} w_k. The third ingredient is GroupNorm in
place of batch normalization: the network's `norm` = "group", which a configuration has to set.

server: params, stats and tensors of the objective; with `return_group` also groups, leaves (S, ...).  broadcast:
params, stats and tensors of the objective, of the mean or of the client's group.  memory: with `keep_optimizer`, the
optimizer's state.  upload: the trained broadcast.

With labels at clients, groups of equal size and one model for all, this is FedAvg with equal weights. GroupNorm then
remains of the method, and, in the authors' code, that clients start from their group's mean while only the server's
copies start from the mean over groups: `return_group`. The default is the reading that tables of later papers need; the
authors' code for labels at clients does not run as published. It has few clients, which are in every round. With a
drawn cohort, a client starts from the mean of the group that it is assigned to next. Further departures:
- Groups follow a hash of round and client: the same for every seed, as a method draws no random numbers.
- Batch-normalization statistics, which GroupNorm does not have, are averaged like parameters.
- Momentum survives the averaging in the authors' code; here it does with `keep_optimizer`.

SemiFL's tables have another version, which is that method's loop with the weights of two groups:
`halfmoon.methods.semifl`, `server_share`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import ClientUpdate, Federation, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import check_minimum
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import FixMatch, Supervised
from halfmoon.methods.objectives.pseudo_labeling import refuse_average_teacher


@dataclass(frozen=True)
class FedRGD:
    """FedRGD with FixMatch as the clients' objective.

    Attributes:
        objective: the clients' objective.
        groups: number of random groups (the paper: 2 for 10 or 20 clients, 3 for 30, 5 for 47).
        return_group: whether a client starts from the mean of its group, instead of the mean over groups.
        keep_optimizer: whether clients keep their momentum between rounds; the server's copies never do.

    Raises:
        UserError: without a group, or for an average of the server's models as teacher: the groups have several models.
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
        """Run a round of FedRGD: average the clients of each random group, then average the groups.

        If the server has labels, each group's average includes a copy of the server's model that trained on them.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: model, and each group's model with `return_group`.
            federation: the clients of this round.

        Returns:
            The server's new state.
        """
        # "stats" is {} in a network without batch normalization.
        model: Tree = {"stats": {}, **{name: section for name, section in server.items() if name != "groups"}}
        group_of = assign_groups(to_ints(federation.cohort), task.round, self.groups)
        if self.return_group:
            # Each client continues its group's model instead of the average of all groups.
            starts: Tree = {"stats": {}, **server["groups"]}
            group_indices = torch.tensor([group_of[client] for client in to_ints(federation.cohort)])
            model_of_each_client = tree.map(lambda leaf: leaf[group_indices], starts)
            upload = federation.query("train", {}, model_of_each_client)
        else:
            starts = tree.stack([model] * self.groups)
            upload = federation.query("train", model)
        responder_groups = [group_of[client] for client in to_ints(federation.responders)]
        group_means: list[Tree] = []
        for number in range(self.groups):
            members: list[Tree] = []
            for position, group in enumerate(responder_groups):
                if group == number:
                    members.append(tree.index(upload.update, position))
            if federation.labeled:
                members.append(federation.query_server("serve", model).update)
            # The model's sections in its order, so that the trees of clients and server can be stacked.
            group_means.append(mean([{name: member[name] for name in model} for member in members]))
        # `mean` of a group without a reply is {}, which is left out here.
        new = mean([group_mean for group_mean in group_means if group_mean])
        if not self.return_group:
            return new
        # A group without a reply retains its previous model.
        groups = [group_mean or tree.index(starts, number) for number, group_mean in enumerate(group_means)]
        return {**new, "groups": tree.stack(groups)}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.objective.solution({"stats": {}, **server})


def assign_groups(cohort: Sequence[int], round: int, groups: int) -> dict[int, int]:
    """Assign each client to a group, at random for each round, with group sizes that differ by at most one."""
    # Sorting by a hash is a shuffle without random draws; the shuffled clients are dealt to the groups in turn.
    order = sorted(cohort, key=lambda client: rng.derive_seed(0, "fedrgd", round, client))
    return {client: rank % groups for rank, client in enumerate(order)}


def mean(trees: Sequence[Tree]) -> Tree:
    """Average trees with equal weights; return {} for no trees."""
    return tree.weighted_mean(tree.stack(trees), torch.ones(len(trees))) if trees else {}


ROWS = (
    MethodEntry("fedrgd", "FedRGD", "FedRGD (SSFL), IEEE BigData 2021",
                "FixMatch, averaged in random groups; meant for norm = 'group'", FedRGD()),
    MethodEntry("fedrgd-feddpl", "FedRGD + FedDPL", "FedRGD (SSFL), IEEE BigData 2021; FedDB, IJCAI 2024",
                "FedRGD with predictions divided by each client's mean prediction; meant for norm = 'group'",
                FedRGD(FixMatch(debias=True))),
)  # fmt: skip
