"""SemiFL (Diao, Ding and Tarokh, NeurIPS 2022): clients without labels and a labeling server train in turn.

Each client of the cohort labels all its rows once, with the received model under static batch normalization, and keeps
those it is sure of (max p >= threshold): the "fix" set. Beside each minibatch of it stands one of the "mix" set,
drawn with replacement from all local rows. With hard labels, l ~ Beta(a, a) and m = l weak(fix) + (1 - l) weak(mix),

    loss = CE(f(strong(fix)), y_fix) + mix_weight [l CE(f(m), y_fix) + (1 - l) CE(f(m), y_mix)].

The server averages those who trained, takes a step with momentum, and then fine-tunes on its own labels. With labels at
the clients (FedDB's table, IJCAI 2024) the same file adds CE on the client's labeled images, and the server, which has
no rows, takes no step.

server: params, stats, momentum; with `halves` rest, sigma and psi in place of params.  broadcast: all but the momentum.
memory: the optimizer's state, at clients and server; with `labels` "step" and thresholds that adapt, theirs.
upload: params (psi), weight (1, or 0 from a client that was sure of nothing). For the statistics the model travels once
more, to all whose rows are counted (`static`): with `sbn` "all", as in the authors' code, to every client in every
round.

Departures: the paper's text names few hyper-parameters; the defaults are those of the authors' code, but for these.

- Statistics are counted by the row within each client (`static`); the first ones before round 1, as there.
- Epochs and batch sizes are the batch rule's, under which a last batch is filled, not cut. One that holds all rows at
  once ("rest") cycles the fix set.
- Under `task.statistics` "joint" strong and mixed images share a forward pass; "separate" is the authors' reading.
  Labels "step" are made in passes of their own. Their third pass, on weak views, serves a log and is left out.
- `fine_tune` False is the authors' control, and its fall is not for want of training in turn. The step with momentum
  starts at the model that the server has just trained, so that the server's half of a change of d stays as d/2 in its
  round and loses keep d/2, keep^2 d/2, ... in those after it: d (1/2 - keep/2 - keep^2/2 - ...), which at the default
  of 0.5 is nothing. Where no row of a client counts, the model comes back to its start. `server_momentum` 0 is the
  control of the control.
- A client with labels but sure of nothing draws from all its rows and learns from its labels alone, so that labels at
  the clients can set off (FedDB's code does so).

The rows "FedRGD" and "FedMatch" of the paper's tables are this method's loop with labels "step" and `mix_weight` 0:

- FedRGD: `fine_tune` False and `server_share` "groups". Two groups of n / 2 clients, each with a copy of the server's
  model, average to 1 / (n / 2 + 1) of that model, whoever is in which.
- FedMatch: `halves`. Each kernel is sigma + psi, the server trains sigma and the clients psi; nobody trains biases,
  normalizations and the head, which are in neither half there. There, the server trains the first half of sigma's
  output channels alone, by a slip (here all), and gradients of what is not trained pile up in the norm that is clipped
  (here they count nothing). psi is drawn from one seed, for a method draws no random number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Passes,
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import step_towards_mean
from halfmoon.methods.batchnorm_stats import BatchNormStatistics, Over, estimate_statistics, statistics_requirements
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import Supervised
from halfmoon.methods.objectives.base import (
    RoundLabelingClient,
    cross_entropy_per_image,
    debias_logits,
    labeled_cross_entropy,
    mean_prediction,
    predict_with_running_stats,
    predict_with_teacher,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold
from halfmoon.models import forward


@dataclass(frozen=True)
class SemiFL:
    """SemiFL, Algorithm 1, with the authors' released settings.

    `labels`: "round" fixes the pseudo-labels when a client update begins (the paper's), "step" guesses anew on every
    minibatch with the model of the moment, under the task's `labeling` statistics; a step sure of nothing is skipped,
    but its client stays in the average (with `mix_weight` 0: the authors' FedAvg + FixMatch). `drop_unsure`: under
    "step" unsure images leave before the forward pass, as in the authors' code, so that batch statistics are those of
    the sure ones; under "round" no unsure image is drawn in the first place. `mix_weight` 0 leaves the
    mix set out; `thresholding` and `threshold_decay` say which rows a client is sure of; `concentration` is a of the
    Beta(a, a). `debias` divides every guess by the client's mean prediction (FedDPL, FedDB Eq. 14) before it is judged.
    `fine_tune` False: the server trains beside the clients, and has `server_share` of the average: "half", or that of
    FedRGD's "groups". `halves`: FedMatch's kernels in two parts. `sbn`: whose rows the statistics are counted over.
    `unlabeled_weight` stands before the whole loss on unlabeled images.

    Raise `UserError` for halves without fine-tuning: what would be averaged are different halves.
    """

    threshold: float = 0.95
    mix_weight: float = 1.0
    concentration: float = 0.75
    unlabeled_weight: float = 1.0
    labels: Literal["round", "step"] = "round"
    drop_unsure: bool = True
    debias: bool = False
    fine_tune: bool = True
    server_share: Literal["half", "groups"] = "half"
    halves: bool = False
    server_momentum: float = 0.5
    sbn: Over = "all"
    keep_optimizer: bool = True
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999

    def __post_init__(self) -> None:
        if self.halves and not self.fine_tune:
            raise UserError(
                "halves is set and fine_tune is not: clients train one half of each kernel and the server the other, "
                "so there is nothing to average; set fine_tune, or leave halves out."
            )

    @property
    def rule(self) -> Threshold:
        """Return which rows a client is sure of."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    @property
    def trained(self) -> str:
        """Return the name of the part of the model that clients train."""
        return "psi" if self.halves else "params"

    def parameters(self, model: Tree, trained: Tree | None = None) -> Tree:
        """Return the network's parameters in `model`, with `trained` for the part that clients train."""
        if not self.halves:
            return model["params"] if trained is None else trained
        psi = model["psi"] if trained is None else trained
        return merge(model["rest"], tree.map(torch.add, model["sigma"], psi))

    def requirements(self, norm: str) -> Requirements:
        return statistics_requirements(norm, self.sbn)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        own_labels = LocalTraining(task, Supervised(), keep_optimizer=self.keep_optimizer)
        teaching = SigmaTraining(task, self) if self.halves else own_labels
        return {"train": Mixing(task, self), "fine-tune": teaching, "census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        if not self.halves:
            return {**model, "momentum": tree.zeros_like(model["params"])}
        like = next(tree.leaves(model["params"]))
        sigma, rest = apart(model["params"])
        other, _ = apart(task.network.init(rng.generator(0, "semifl", "psi"))["params"])
        psi = tree.to(other, like.device, like.dtype)
        stats = {"stats": model["stats"]} if "stats" in model else {}
        return {"rest": rest, "sigma": sigma, "psi": psi, **stats, "momentum": tree.zeros_like(psi)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        model: Tree = {"stats": {}, **{name: part for name, part in server.items() if name != "momentum"}}
        if task.round == 0:
            model = {**model, "stats": estimate_statistics(federation, self.solution(task, model), self.sbn)}
        mean, old, share = federation.average("train", model), model[self.trained], 0.0
        if federation.labeled and not self.fine_tune:
            old = federation.query_server("fine-tune", model).update["params"]
            share = 0.5 if self.server_share == "half" else 1 / (float(mean.weight) / 2 + 1)
        mean = mean._replace(update={"params": mean.update[self.trained]})
        new, momentum = step_towards_mean(old, mean, server["momentum"], self.server_momentum, share)
        model = {**model, self.trained: new}
        if federation.labeled and self.fine_tune:
            taught = federation.query_server("fine-tune", model).update
            model = {**model, **taught, "stats": model["stats"]}
        return {
            **model,
            "stats": estimate_statistics(federation, self.solution(task, model), self.sbn),
            "momentum": momentum,
        }

    def solution(self, task: Task, server: Tree) -> Tree:
        return {"params": self.parameters(server), "stats": server.get("stats", {})}


@dataclass(frozen=True)
class SigmaTraining(ClientUpdate):
    """The server's own training where kernels are in halves: sigma on its labels, under the batch's statistics."""

    options: SemiFL = SemiFL()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            masks_padding=True, keep_optimizer=self.options.keep_optimizer, upload_spec=UploadSpec(("sigma",), ())
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return super().initial_memory({"params": broadcast["sigma"]}, generator)

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return super().begin({"params": broadcast["sigma"]}, memory, data)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, _ = grad_and_value(self._loss, carry["params"], broadcast, batch)
        return self.advance(carry, gradient), StepMetrics(loss, {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        _, memory = super().finish(broadcast, carry, data)
        return Upload({"sigma": carry["params"]}, (data.labeled > 0).double()), memory

    def _loss(self, sigma: Tree, broadcast: Tree, batch: Batch) -> tuple[Tensor, tuple[()]]:
        theta = self.options.parameters({**broadcast, "sigma": sigma})
        logits, _ = self.task.network.train(theta, batch.x, real=batch.x_real)
        return labeled_cross_entropy(logits, batch.y, batch.x_real), ()


@dataclass(frozen=True)
class Mixing(RoundLabelingClient):
    """The client of SemiFL: label, then train on confident and on mixed rows."""

    options: SemiFL = SemiFL()

    @property
    def requirements(self) -> UpdateRequirements:
        o = self.options
        return UpdateRequirements(
            views=("weak", "strong") if o.mix_weight or o.labels == "step" else ("strong",),
            precomputed_views=("weak",) if o.labels == "round" or o.debias or o.rule.needs_all_rows else (),
            second_batch=("weak",) if o.mix_weight else (),
            mixup=o.concentration if o.mix_weight else None,
            masks_padding=True,
            row_memory=o.rule.row_memory if self._runs else {},
            keep_optimizer=o.keep_optimizer,
            upload_spec=UploadSpec((o.trained,), (), "one"),
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        first = broadcast[self.options.trained]
        memory = super().initial_memory({"params": first}, generator)
        state = self.options.rule.initial_memory(self.task.network.classes, next(tree.leaves(first)))
        return {**memory, "thresholds": state} if state and self.options.labels == "step" else memory

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        carry: Tree = {**super().begin({"params": broadcast[self.options.trained]}, memory, data), "thresholds": {}}
        rule, by_step = self.options.rule, self.options.labels == "step"
        if by_step and not rule.needs_all_rows:
            carry["thresholds"] = rule.begin(memory.get("thresholds", {}), data)
        if not self.requirements.precomputed_views:
            return carry
        received = self.options.parameters(broadcast)
        guess = predict_with_running_stats(self.task, received, broadcast["stats"], data.views["weak"])
        expected = mean_prediction(guess, data.u_real)
        p = self._predicted(guess, expected)
        if by_step:
            state = rule.begin({}, data, p) if rule.needs_all_rows else carry["thresholds"]
            return {**carry, "prior": expected, "thresholds": state}
        pseudo = rule.pseudo_label_all(p, {}, data.u_real)
        return {**carry, **pseudo._asdict(), "real": data.real}

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        return super().drawable_rows(carry, data) if self.options.labels == "round" else None

    def initial_pseudo_labels(self, carry: Tree, data: ClientData) -> tuple[PseudoLabels, ...]:
        return super().initial_pseudo_labels(carry, data) if self.options.labels == "round" else ()

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step; with labels "step", one that has neither labels nor sure guesses is skipped."""
        gradient, loss, (pseudo, state) = grad_and_value(self._loss, carry["params"], broadcast, carry, batch)
        new = self.advance(carry, gradient, thresholds=state)
        unlabeled = not len(batch.x)
        if self.options.labels == "step" and (unlabeled or batch.x_real is not None):
            sure = pseudo.weight.sum() > 0
            teaches = sure if batch.x_real is None else sure | batch.x_real.any()
            new = {**tree.select(teaches, new, carry), "thresholds": state}
        if self.options.labels == "step":
            return new, StepMetrics(loss, {}, (pseudo,))
        confident = weighted_metric((carry["weight"] > 0).to(loss.dtype), carry["real"].get("u"))
        return new, StepMetrics(loss, {"kept": confident}, (pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        mask, rows = self.drawable_rows(carry, data), data.unlabeled > 0
        trained = rows if mask is None else rows & mask.any()
        _, memory = super().finish(broadcast, carry, data)
        own = {"thresholds": carry["thresholds"]} if self._runs else {}
        return Upload({self.options.trained: carry["params"]}, trained.double()), {**memory, **own}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        sets = 2 if self.options.mix_weight else 1
        taught = labeled + sets * unlabeled
        guessed = 0 if self.options.labels == "round" else sets * unlabeled
        return Passes(taught + guessed, taught)

    @property
    def _runs(self) -> bool:
        """Return whether thresholds have a state that stays at the client."""
        return self.options.labels == "step" and self.options.rule.has_memory

    def _loss(
        self, trained: Tree, broadcast: Tree, carry: Tree, batch: Batch
    ) -> tuple[Tensor, tuple[PseudoLabels, Tree]]:
        o, params = self.options, self.options.parameters(broadcast, trained)
        weak, rows = [batch.u[view] for view in self.requirements.views if view == "weak"], [batch.u_rows]
        if o.mix_weight:
            weak, rows = [*weak, batch.second_batch["weak"]], [*rows, batch.mixing["second_batch_rows"]]
        if o.labels == "round":
            pseudo, state = PseudoLabels(*(carry[name][batch.u_rows] for name in ("label", "confidence", "weight"))), {}
            labels = [carry["label"][at] for at in rows]
        else:
            teacher = [
                predict_with_teacher(self.task, params, broadcast["stats"], images, batch.u_real) for images in weak
            ]
            guesses = [self._predicted(each, carry.get("prior")) for each in teacher]
            pseudo, state = o.rule.pseudo_label(guesses[0], batch.u_rows, carry["thresholds"], batch.u_real)
            labels = [pseudo.label, *(each.argmax(-1) for each in guesses[1:])]
        used = padding.mask(pseudo.weight.to(batch.x.dtype), batch.u_real)
        taught, share = [batch.u["strong"]], torch.ones((), dtype=batch.x.dtype, device=batch.x.device)
        if o.mix_weight:
            share = batch.mixing["mix"].to(batch.x.dtype)
            taught.append(share * weak[0] + (1 - share) * weak[1])
        real = batch.masks(len(taught))
        if o.labels == "step" and o.drop_unsure:
            real, taught = self._sure(used > 0, batch, taught)
        joint = self.task.statistics == "joint"
        (logits, *others), _, _ = forward(self.task.network, params, joint, (batch.x, *taught), real=real)
        loss = cross_entropy_per_image(others[0], labels[0])
        if o.mix_weight:
            mix_rows = share * cross_entropy_per_image(others[1], labels[0]) + (1 - share) * cross_entropy_per_image(
                others[1], labels[1]
            )
            loss = loss + o.mix_weight * mix_rows
        unlabeled = (loss * used).sum() / used.sum().clamp_min(1)
        total = labeled_cross_entropy(logits, batch.y, batch.x_real) + o.unlabeled_weight * unlabeled
        return total, (pseudo._replace(weight=used), state)

    @staticmethod
    def _sure(sure: Tensor, batch: Batch, taught: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return masks by which batch statistics leave out unsure images (b,), in whose places stands a sure one."""
        at = torch.where(sure, torch.arange(len(sure), device=sure.device), sure.int().argmax())
        labeled = torch.ones_like(batch.y, dtype=torch.bool) if batch.x_real is None else batch.x_real
        return (labeled, *[sure] * len(taught)), [images[at] for images in taught]

    def _predicted(self, guess: Tensor, expected: Tensor | None) -> Tensor:
        """Return the predictions of logits (b, classes), debiased where that is wanted."""
        if self.options.debias and expected is not None:
            guess = debias_logits(guess, expected)
        return guess.softmax(-1)


def apart(params: Tree) -> tuple[Tree, Tree]:
    """Return the kernels of all layers but the head, and the rest: biases, normalizations and the head."""
    flat = tree.flatten(params)
    kernel = {path for path, leaf in flat.items() if leaf.dim() > 1 and not path.startswith("head/")}
    parts = ({path: leaf for path, leaf in flat.items() if (path in kernel) is own} for own in (True, False))
    return tree.unflatten(next(parts)), tree.unflatten(next(parts))


def merge(rest: Tree, kernel: Tree) -> Tree:
    """Return what `apart` has taken apart."""
    return tree.unflatten({**tree.flatten(rest), **tree.flatten(kernel)})


ROWS = (
    MethodEntry("semifl", "SemiFL", "SemiFL, NeurIPS 2022",
                "clients train on rows that they are sure of, and the server on its labels, in turn", SemiFL()),
    MethodEntry("semifl-feddpl", "SemiFL + FedDPL", "SemiFL, NeurIPS 2022; FedDB, IJCAI 2024",
                "SemiFL with guesses divided by each client's mean prediction", SemiFL(debias=True)),
    MethodEntry("fedmatch-semifl", "FedMatch, SemiFL's version", "SemiFL, NeurIPS 2022, Table 1",
                "half of each kernel learns from labels, half from confident guesses; no helpers, no penalties",
                SemiFL(labels="step", mix_weight=0.0, halves=True)),
)  # fmt: skip
