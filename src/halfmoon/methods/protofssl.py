"""ProtoFSSL (Kim et al. 2022): no classifier; an image is of the class whose prototype its features are nearest to.

With d(e, p) = the mean over features of (e - p)^2, a step is an episode: the first image of each class in the labeled
minibatch is its prototype (support), the others (queries) teach:

    loss = mean over queries CE(y, softmax(-d(e, P))) + unlabeled_weight mean over u CE(t(u), softmax(-d(e(u), P))),

t = sharpen(mean over helpers h of softmax(-d(e(u), P_h))): the prototypes of up to `helpers` clients of the last round
label the unlabeled images. After training a client takes the means of the features of all its labeled images, class by
class, and sends them with the model. The server averages the models, all clients alike, and hands the helpers out;
classes that one of them has not are filled with the mean of those who have.

server: params, stats; of the last round mean (classes, features), which classes are known, helpers (H, classes,
features), and how many are there.  broadcast: the same without the mean.  memory: none.  upload: params, stats, own
(classes, features), present (classes,), weight (1; 0 from a client without images). A prototype of few images tells
much of them: of one image, its features.

Departures: their episodes draw 1 support and 2 query images of each class; here they are the batch rule's, and a class
that the minibatch lacks has the helpers' mean as its prototype. The weak view is looked at. As in their code the
target's gradient is not stopped (`through_target`). Prototypes are taken under tracked statistics. The evaluated model
has the mean prototypes as its head: -d(e, p) is (2 e p - p^2) / features up to what all classes share. RMSprop and
their test at the best round on validation images are the run's to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core.autodiff import cross_entropy, grad_and_value
from halfmoon.core.errors import UserError, check_minimum
from halfmoon.core.padding import mask
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.objectives.base import embed_groups, one_hot, sharpen, soft_cross_entropy, split_into_chunks

FAR = 1e4
"""The distance of a class of which nobody knows a prototype."""


@dataclass(frozen=True)
class ProtoFSSL:
    """ProtoFSSL with the authors' settings: 5 helpers, weight 0.3, temperature 0.5.

    Raises `UserError` for fewer than one helper, and for a network without a bias in its head (`norm` "none").
    """

    helpers: int = 5
    unlabeled_weight: float = 0.3
    temperature: float = 0.5
    through_target: bool = True

    def __post_init__(self) -> None:
        check_minimum(self, 1, "helpers")

    def requirements(self, norm: str) -> Requirements:
        reason = "clients are sent the prototypes of single other clients"
        return Requirements(reason=reason, label_locations=("clients",), personal=True)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Episodes(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        head = model["params"]["head"]
        if "bias" not in head:
            raise UserError("ProtoFSSL's prototypes make a head with a bias; set norm to 'batch' or 'group'.")
        mean = torch.zeros_like(head["weight"])
        helpers = mean.new_zeros(self.helpers, *mean.shape)
        return {**model, "mean": mean, "known": mean[:, 0], "helpers": helpers, "there": helpers[:, 0, 0]}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train with the last round's helpers, average, and keep the new ones."""
        server = {"stats": {}, **server}
        upload = federation.query("train", {name: part for name, part in server.items() if name != "mean"})
        new, own = average_uploads(upload, server), upload.aux["own"]
        present = upload.aux["present"] * (upload.weight > 0)[:, None]
        share = present / present.sum(0).clamp_min(1)
        class_present = (present.sum(0) > 0)[:, None]
        mean = torch.where(class_present, (share[..., None] * own).sum(0), server["mean"])
        filled = torch.where(present[..., None] > 0, own, mean)
        indices = (upload.weight > 0).nonzero().flatten()[: self.helpers]
        helpers, there = torch.zeros_like(server["helpers"]), torch.zeros_like(server["there"])
        helpers[: len(indices)], there[: len(indices)] = filled[indices].to(helpers), 1.0
        class_mask = torch.maximum(server["known"], class_present[:, 0].to(server["known"]))
        return {**new, "mean": mean.to(server["mean"]), "known": class_mask, "helpers": helpers, "there": there}

    def solution(self, task: Task, server: Tree) -> Tree:
        mean = server["mean"]
        bias = -mean.square().mean(-1) - FAR * (1 - server["known"])
        head = {"weight": 2 * mean / mean.shape[-1], "bias": bias}
        return {"params": {**server["params"], "head": head}, "stats": server.get("stats", {})}


@dataclass(frozen=True)
class Episodes(ClientUpdate):
    """The client of ProtoFSSL."""

    options: ProtoFSSL = ProtoFSSL()

    @property
    def requirements(self) -> UpdateRequirements:
        aux = {"own": Aux(), "present": Aux(values="mark")}
        return UpdateRequirements(("weak",), masks_padding=True, upload_spec=UploadSpec(weight="one", aux=aux))

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], broadcast, batch)
        return self.advance(carry, gradient, moments), StepMetrics(loss, {}, (pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        head = carry["params"]["head"]["weight"]
        own = (torch.arange(len(data.y), device=data.y.device) < data.labeled)[:, None]
        member = one_hot(data.y, len(head), head) * own
        count = member.sum(0)
        total = torch.zeros_like(head)
        if len(data.x):
            total = member.T @ torch.cat([self._features(carry, part) for part in split_into_chunks(data.x)])
        upload = {"params": carry["params"], "stats": carry["stats"]}
        own = {"own": total / count.clamp_min(1)[:, None], "present": (count > 0).to(head.dtype)}
        return Upload(upload, (data.labeled + data.unlabeled > 0).double(), own), {}

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled

    @torch.no_grad()
    def _features(self, model: Tree, images: Tensor) -> Tensor:
        """Return what the head is given (n, features) for images as they are stored, under tracked statistics."""
        weight = model["params"]["head"]["weight"]
        same = {"weight": torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)}
        params = {**model["params"], "head": same}
        return self.task.network.predict(params, model["stats"], self.task.normalize(images))

    def _loss(self, params: Tree, broadcast: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], PseudoLabels]]:
        o, class_mask, there = self.options, broadcast["known"], broadcast["there"]
        groups = (batch.x, batch.u["weak"])
        _, (labeled, unlabeled), moments = embed_groups(self.task, params, groups, batch.masks(1))
        received = (broadcast["helpers"] * there[:, None, None]).sum(0) / there.sum().clamp_min(1)
        support = mask(supports(batch.y), batch.x_real)
        member = one_hot(batch.y, len(class_mask), labeled) * support[:, None]
        here = member.sum(0) > 0
        prototypes = torch.where(here[:, None], member.T @ labeled, received)
        far = torch.where(here | ((class_mask > 0) & (there.sum() > 0)), 0.0, FAR)
        query = mask(1 - support, batch.x_real)
        query_loss = cross_entropy(-distances(labeled, prototypes) - far, batch.y, reduction="none") * query
        loss = (query_loss.sum() if len(batch.y) else labeled.sum() * 0.0) / query.sum().clamp_min(1)
        each = torch.stack(
            [(-distances(unlabeled, p) - FAR * (1 - class_mask)).softmax(-1) for p in broadcast["helpers"]]
        )
        mean = (each * there[:, None, None]).sum(0) / there.sum().clamp_min(1)
        target = sharpen(mean, o.temperature)
        target = target if o.through_target else target.detach()
        taught = soft_cross_entropy(-distances(unlabeled, prototypes) - far, target, batch.u_real)
        counts = (there.sum() > 0).to(loss.dtype)
        confidence, label = target.detach().max(-1)
        pseudo = PseudoLabels(label, confidence, counts * torch.ones_like(confidence))
        return loss + o.unlabeled_weight * counts * taught, (moments, pseudo)


def supports(y: Tensor) -> Tensor:
    """Return 1.0 (n,) for the first image of each class among labels y (n,), 0.0 for the others."""
    place = torch.arange(len(y), device=y.device)
    earlier = (y[:, None] == y) & (place < place[:, None])
    return (~earlier.any(-1)).to(torch.get_default_dtype())


def distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return d (n, classes), the mean squared difference of features (n, F) and prototypes (classes, F)."""
    return (features[:, None] - prototypes).square().mean(-1)


ROWS = (MethodEntry("protofssl", "ProtoFSSL", "Kim et al. 2022", "prototypes of classes, no classifier", ProtoFSSL()),)
