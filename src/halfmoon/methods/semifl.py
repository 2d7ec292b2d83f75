"""SemiFL (Diao, Ding and Tarokh, NeurIPS 2022): clients train on pseudo-labels, then the server on its labels.

Each client of the cohort labels all its rows once, with the received model under static batch normalization. Rows with
max p >= threshold are the "fix" set. Each minibatch of it is paired with one of the "mix" set, drawn with replacement
from all local rows. With hard labels, l ~ Beta(a, a) and m = l weak(fix) + (1 - l) weak(mix),

    loss = CE(f(strong(fix)), y_fix) + mix_weight [l CE(f(m), y_fix) + (1 - l) CE(f(m), y_mix)].

The server averages the clients that trained, takes a step with momentum, and then fine-tunes on its labels. With labels
at the clients (FedDB's table, IJCAI 2024) the loss also has CE on the client's labeled images, and the server, which
has no rows, does not fine-tune.

server: params, stats, momentum; with `halves` rest, sigma and psi in place of params.  broadcast: all but the momentum.
memory: the optimizer's state, at clients and server; with `labels` "step" and adaptive thresholds, their state.
upload: params (psi), weight (1, or 0 from a client without a confident row). To estimate the statistics, the server
sends the model once more, to all clients whose rows are counted (`batchnorm_stats`): with `sbn` "all", as in the
authors' code, to every client in every round.

Departures: the paper's text states few hyper-parameters. The defaults are those of the authors' code, except for these.

- Each client's statistics are weighted by its rows (`batchnorm_stats`); the first ones are estimated before round 1, as
  in the authors' code.
- Epochs and batch sizes are the batch rule's, which fills the last batch instead of cutting it. A batch of all rows at
  once ("rest") cycles through the fix set.
- Under `task.statistics` "joint" strong and mixed images share a forward pass; "separate" is the authors' reading.
  Labels "step" are predicted in separate passes. The authors' third pass, on weak views, is only logged; it is left
  out.
- `fine_tune` False is the authors' control. Its loss of accuracy is caused by the server's momentum, not by the missing
  alternation. The momentum step starts at the model that the server has just trained. The server's half of a change d
  is therefore d/2 in its round, and the rounds after it subtract keep d/2, keep^2 d/2, ...: in total
  d (1/2 - keep/2 - keep^2/2 - ...), which is 0 at the default keep = 0.5. If no row of a client counts, the model
  returns to its start. `server_momentum` 0 removes this effect.
- A client with labels and without a confident row draws from all its rows and learns from its labels only, so that
  training can start with labels at the clients (FedDB's code does the same).

The rows "FedRGD" and "FedMatch" of the paper's tables are this method's loop with labels "step" and `mix_weight` 0:

- FedRGD: `fine_tune` False and `server_share` "groups". Two groups of n / 2 clients, each with a copy of the server's
  model, average to 1 / (n / 2 + 1) of that model for any assignment of clients to groups.
- FedMatch: `halves`. Each kernel is sigma + psi, the server trains sigma and the clients psi. Biases, normalizations
  and the head are in neither half, and are not trained. In the authors' code the server by mistake trains only the
  first half of sigma's output channels (here all), and gradients of untrained parameters accumulate in the norm that is
  clipped (here they do not count). psi is drawn from one seed, because a method draws no random numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

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
    compute_mean_prediction,
    cross_entropy_per_image,
    debias_logits,
    labeled_cross_entropy,
    predict_with_running_stats,
    predict_with_teacher,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold, unused_threshold_options
from halfmoon.models import forward


@dataclass(frozen=True)
class SemiFL:
    """SemiFL, Algorithm 1, with the authors' released settings.

    Attributes:
        threshold: confidence from which a pseudo-label is used.
        mix_weight: weight of the mixed images' loss; 0 leaves the mix set out.
        concentration: a of the mixing ratio's distribution Beta(a, a).
        unlabeled_weight: weight of the whole loss on unlabeled images.
        labels: "round" fixes the pseudo-labels when a client update begins (the paper). "step" predicts them on every
            minibatch with the current model, under the task's `labeling` statistics; a step without labels or confident
            images is skipped, but its client remains in the average (with `mix_weight` 0: the authors' FedAvg with
            FixMatch).
        drop_unsure: under "step", remove images below the threshold before the forward pass, as in the authors' code,
            so that batch statistics are those of confident images only. Under "round" such images are never drawn.
        debias: divide each prediction by the client's mean prediction (FedDPL, FedDB Eq. 14) before the threshold.
        fine_tune: whether the server trains on the average; if False, it trains at the same time as the clients.
        server_share: without `fine_tune`, the server's share of the average: "half", or that of FedRGD's "groups".
        halves: split kernels into FedMatch's two halves.
        server_momentum: momentum of the server's step towards the average.
        sbn: rows that the batch-normalization statistics are estimated on.
        keep_optimizer: whether clients and server keep the optimizer's state between rounds.
        thresholding: rule that adapts the threshold.
        threshold_decay: decay of the running means that some rules use.

    Raises:
        UserError: for halves without fine-tuning, as client and server would upload different halves.
    """

    uses_class_weights: ClassVar[bool] = True

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
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return unused_threshold_options(self.thresholding)

    @property
    def rule(self) -> Threshold:
        """Build the rule that selects the rows whose pseudo-labels are used."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    @property
    def trained(self) -> str:
        """Return the key of the parameters that clients train."""
        return "psi" if self.halves else "params"

    def parameters(self, model: Tree, trained: Tree | None = None) -> Tree:
        """Assemble the network's parameters from SemiFL's tree; with `halves` each kernel is FedMatch's sigma + psi.

        The server trains sigma on labels, clients train psi on pseudo-labels. Other parameters ("rest": biases,
        normalizations) are not trained then.

        Args:
            model: the server's tree: "params", or with `halves` "sigma", "psi" and "rest".
            trained: replaces the parameters that clients train ("params" or "psi"); None: those of `model`.
        """
        if not self.halves:
            return model["params"] if trained is None else trained
        psi = model["psi"] if trained is None else trained
        return merge(model["rest"], tree.map(torch.add, model["sigma"], psi))

    def requirements(self, norm: str) -> Requirements:
        return statistics_requirements(norm, self.sbn)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        supervised = LocalTraining(task, Supervised(), keep_optimizer=self.keep_optimizer)
        fine_tuning = SigmaTraining(task, self) if self.halves else supervised
        return {"train": SemiFLClient(task, self), "fine-tune": fine_tuning, "census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Build the state of SemiFL's server before the first round from the initial model.

        With `halves` each kernel is sigma + psi (FedMatch): sigma starts as the model's kernels. Momentum is of the
        parameters that clients train.

        Args:
            task: with the network, of which a second one is initialized for psi.
            model: "params" and "stats" (running batch-norm statistics) of the initial model.
        """
        if not self.halves:
            return {**model, "momentum": tree.zeros_like(model["params"])}
        model_leaf = next(tree.leaves(model["params"]))
        sigma, rest = split_kernels(model["params"])
        # psi starts as the kernels of a second random network, the same one for every seed.
        second_network = task.network.init(rng.generator(0, "semifl", "psi"))
        initial_psi, _ = split_kernels(second_network["params"])
        psi = tree.to(initial_psi, model_leaf.device, model_leaf.dtype)
        stats = {"stats": model["stats"]} if "stats" in model else {}
        return {"rest": rest, "sigma": sigma, "psi": psi, **stats, "momentum": tree.zeros_like(psi)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of SemiFL: clients train on pseudo-labels, the server averages, then trains on its labels.

        Without `fine_tune` the server trains at the same time as the clients, and its model is part of the average.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: model and momentum.
            federation: the clients of this round.

        Returns:
            The server's new state, with batch-normalization statistics estimated on `sbn` clients' images.
        """
        model: Tree = {"stats": {}, **{name: section for name, section in server.items() if name != "momentum"}}
        if task.round == 0:
            # Clients predict pseudo-labels with these statistics, so the initial model needs some.
            model = {**model, "stats": estimate_statistics(federation, self.solution(task, model), self.sbn)}
        mean = federation.average("train", model)
        # The server steps from `old` to the clients' mean. `trained` names what clients train: the parameters or, with
        # `halves`, psi; without `fine_tune`, `halves` is refused, so it is then the parameters.
        old = model[self.trained]
        share = 0.0
        if federation.labeled and not self.fine_tune:
            # As in the authors' code, the step starts at the model that the server has just trained, not at the one
            # that it sent; the module docstring computes the effect with momentum.
            old = federation.query_server("fine-tune", model).update["params"]
            # `share` is the server's part of the average: half, or that in FedRGD's "groups". There, two groups of n / 2
            # clients each average with a copy of the server's model: it counts as one of n / 2 + 1 models.
            trained_clients = float(mean.weight)  # each has the weight 1
            share = 0.5 if self.server_share == "half" else 1 / (trained_clients / 2 + 1)
        mean = mean._replace(update={"params": mean.update[self.trained]})
        new, momentum = step_towards_mean(old, mean, server["momentum"], self.server_momentum, share)
        model = {**model, self.trained: new}
        if federation.labeled and self.fine_tune:
            fine_tuned = federation.query_server("fine-tune", model).update
            # Statistics of fine-tuning are replaced by estimates over the clients' rows below.
            model = {**model, **fine_tuned, "stats": model["stats"]}
        return {
            **model,
            "stats": estimate_statistics(federation, self.solution(task, model), self.sbn),
            "momentum": momentum,
        }

    def solution(self, task: Task, server: Tree) -> Tree:
        return {"params": self.parameters(server), "stats": server.get("stats", {})}


@dataclass(frozen=True)
class SigmaTraining(ClientUpdate):
    """The server's training with kernels in halves: sigma on its labels, under batch statistics."""

    options: SemiFL = SemiFL()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            masks_padding=True,
            keep_optimizer=self.options.keep_optimizer,
            upload_spec=UploadSpec(update=("sigma",), statistics=()),
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return super().initial_memory({"params": broadcast["sigma"]}, generator)

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return super().begin({"params": broadcast["sigma"]}, memory, data)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, _ = grad_and_value(self._loss, carry["params"], broadcast, batch)
        return self.optimizer_step(carry, gradient), StepMetrics(loss, samples={}, pseudo=())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        _, memory = super().finish(broadcast, carry, data)
        return Upload({"sigma": carry["params"]}, weight=(data.labeled > 0).double()), memory

    def _loss(self, sigma: Tree, broadcast: Tree, batch: Batch) -> tuple[Tensor, tuple[()]]:
        params = self.options.parameters({**broadcast, "sigma": sigma})
        logits, _ = self.task.network.train(params, batch.x, real=batch.x_real)
        return labeled_cross_entropy(logits, batch.y, batch.x_real, self.task.class_weights), ()


@dataclass(frozen=True)
class SemiFLClient(RoundLabelingClient):
    """The client of SemiFL: it labels its rows, then trains on confident and on mixed rows."""

    options: SemiFL = SemiFL()

    @property
    def requirements(self) -> UpdateRequirements:
        """Data that SemiFL's client needs: views of its images, mixup partners, predictions on all its images.

        Each confident image is mixed with one of a second batch. With `labels` "round" all images are labeled once, when
        the client update begins; with "step" a weak view is predicted in each step.
        """
        options = self.options
        mixes = bool(options.mix_weight)
        needs_weak = mixes or options.labels == "step"
        predicts_all_rows = options.labels == "round" or options.debias or options.rule.needs_all_rows
        return UpdateRequirements(
            views=("weak", "strong") if needs_weak else ("strong",),
            precomputed_views=("weak",) if predicts_all_rows else (),
            second_batch=("weak",) if mixes else (),
            mixup=options.concentration if mixes else None,
            masks_padding=True,
            row_memory=options.rule.row_memory if self._stores_thresholds else {},
            keep_optimizer=options.keep_optimizer,
            # Only parameters: the server estimates statistics in a query after the round.
            upload_spec=UploadSpec(update=(options.trained,), statistics=(), weight="one"),
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        trained = broadcast[self.options.trained]
        memory = super().initial_memory({"params": trained}, generator)
        thresholds = self.options.rule.initial_memory(self.task.network.classes, next(tree.leaves(trained)))
        return {**memory, "thresholds": thresholds} if thresholds and self.options.labels == "step" else memory

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update: SemiFL pseudo-labels all images once, with the received model.

        With `labels` "step" the pseudo-labels are computed in each step instead. Then this computes only what they
        need from all images: the mean prediction ("prior"), and the state of adaptive thresholds.

        Args:
            broadcast: the tree that the server sent.
            memory: the state that the client stored after its last update.
            data: the client's images.

        Returns:
            The carry: parameters and optimizer state; with labels "round" also "label", "confidence" and "weight" of all
            images (U,) and the masks of padding ("real").
        """
        # `rule` selects the pseudo-labels to use: a fixed confidence, or adaptive thresholds with a state.
        carry: Tree = {**super().begin({"params": broadcast[self.options.trained]}, memory, data), "thresholds": {}}
        rule = self.options.rule
        labels_by_step = self.options.labels == "step"
        if labels_by_step and not rule.needs_all_rows:
            carry["thresholds"] = rule.begin(memory.get("thresholds", {}), data)
        if not self.requirements.precomputed_views:
            return carry
        received = self.options.parameters(broadcast)
        logits = predict_with_running_stats(self.task, received, broadcast["stats"], data.views["weak"])
        prior = compute_mean_prediction(logits, data.u_real)
        probabilities = self._probabilities(logits, prior)
        if labels_by_step:
            thresholds = rule.begin({}, data, probabilities) if rule.needs_all_rows else carry["thresholds"]
            return {**carry, "prior": prior, "thresholds": thresholds}
        pseudo = rule.pseudo_label_all(probabilities, {}, data.u_real)
        return {**carry, **pseudo._asdict(), "real": data.real}

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        return super().drawable_rows(carry, data) if self.options.labels == "round" else None

    def initial_pseudo_labels(self, carry: Tree, data: ClientData) -> tuple[PseudoLabels, ...]:
        return super().initial_pseudo_labels(carry, data) if self.options.labels == "round" else ()

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step; with labels "step", skip it if there are neither labels nor confident images.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update: parameters, optimizer's state, pseudo-labels or thresholds.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the step's loss and pseudo-labels.
        """
        gradient, loss, (pseudo, thresholds) = grad_and_value(self._loss, carry["params"], broadcast, carry, batch)
        new = self.optimizer_step(carry, gradient, thresholds=thresholds)
        without_labels = not len(batch.x)
        if self.options.labels == "step" and (without_labels or batch.x_real is not None):
            # A step with a gradient of 0 would still apply momentum and weight decay. The thresholds move all the same.
            has_confident = pseudo.weight.sum() > 0
            has_loss = has_confident if batch.x_real is None else has_confident | batch.x_real.any()
            new = {**tree.select(has_loss, new, carry), "thresholds": thresholds}
        if self.options.labels == "step":
            return new, StepMetrics(loss, samples={}, pseudo=(pseudo,))
        # The metric "kept" is the share of the client's images whose pseudo-label is used.
        used_share = weighted_metric((carry["weight"] > 0).to(loss.dtype), carry["real"].get("u"))
        return new, StepMetrics(loss, samples={"kept": used_share}, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Return the upload, with the weight 1 (0 if no image was used), and the state that the client stores.

        With `labels` "round" an image is used if its pseudo-label is confident. Clients have equal weights, as in the
        authors' code.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step.
            data: the client's images and labels.
        """
        drawable = self.drawable_rows(carry, data)  # (U,) bool: the images that steps could draw; None: all
        has_trained = data.unlabeled > 0
        if drawable is not None:
            has_trained = has_trained & drawable.any()
        _, memory = super().finish(broadcast, carry, data)
        thresholds = {"thresholds": carry["thresholds"]} if self._stores_thresholds else {}
        upload = Upload({self.options.trained: carry["params"]}, weight=has_trained.double())
        return upload, {**memory, **thresholds}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        sets = 2 if self.options.mix_weight else 1  # strong views and, with `mix_weight`, as many mixed images
        trained = labeled + sets * unlabeled
        predicted = 0 if self.options.labels == "round" else sets * unlabeled
        return Passes(trained + predicted, trained)

    @property
    def _stores_thresholds(self) -> bool:
        """True if the client memory has a state of adaptive thresholds."""
        return self.options.labels == "step" and self.options.rule.has_memory

    def _loss(
        self, trained: Tree, broadcast: Tree, carry: Tree, batch: Batch
    ) -> tuple[Tensor, tuple[PseudoLabels, Tree]]:
        """Compute SemiFL's loss of one minibatch: of labels, of strong views and, with `mix_weight`, of mixed images.

        The "fix" set is the images whose pseudo-label is confident. Each of its images is mixed with one of the "mix"
        set, which is drawn from all images (`halfmoon.methods.semifl`).

        Args:
            trained: the parameters in which the loss is differentiated: all or, with `halves`, psi.
            broadcast: the tree that the server sent, with statistics and parameters that are not trained.
            carry: state of the client update: with labels "round" the pseudo-labels of all images, else thresholds.
            batch: labeled images x, labels y, views u of unlabeled images, and the minibatch of the mix set.

        Returns:
            The loss (), and (pseudo-labels of the fix set's minibatch, the new state of the thresholds).
        """
        options = self.options
        params = options.parameters(broadcast, trained)
        # Entry 0 is the minibatch of the fix set, entry 1 (with `mix_weight`) that of the mix set.
        weak = [batch.u[view] for view in self.requirements.views if view == "weak"]
        rows = [batch.u_rows]
        if options.mix_weight:
            weak = [*weak, batch.second_batch["weak"]]
            rows = [*rows, batch.mixing["second_batch_rows"]]
        state: Tree = {}
        if options.labels == "round":
            pseudo = PseudoLabels(
                label=carry["label"][batch.u_rows],
                confidence=carry["confidence"][batch.u_rows],
                weight=carry["weight"][batch.u_rows],
            )
            labels = [carry["label"][index] for index in rows]
        else:
            logits_of_sets = [
                predict_with_teacher(self.task, params, broadcast["stats"], images, batch.u_real) for images in weak
            ]
            predictions = [self._probabilities(logits, carry.get("prior")) for logits in logits_of_sets]
            pseudo, state = options.rule.pseudo_label(predictions[0], batch.u_rows, carry["thresholds"], batch.u_real)
            labels = [pseudo.label, *(p.argmax(-1) for p in predictions[1:])]
        used = padding.mask(pseudo.weight.to(batch.x.dtype), batch.u_real)
        images = [batch.u["strong"]]
        share = torch.ones((), dtype=batch.x.dtype, device=batch.x.device)
        if options.mix_weight:
            share = batch.mixing["mix"].to(batch.x.dtype)
            images.append(share * weak[0] + (1 - share) * weak[1])
        real = batch.masks(views=len(images))
        if options.labels == "step" and options.drop_unsure:
            real, images = self._leave_out_unconfident(used > 0, batch, images)
        joint = self.task.statistics == "joint"
        (labeled_logits, *unlabeled_logits), _, _ = forward(
            self.task.network, params, joint, (batch.x, *images), real=real
        )
        loss = cross_entropy_per_image(unlabeled_logits[0], labels[0])
        if options.mix_weight:
            fix_loss = cross_entropy_per_image(unlabeled_logits[1], labels[0])
            mix_loss = cross_entropy_per_image(unlabeled_logits[1], labels[1])
            loss = loss + options.mix_weight * (share * fix_loss + (1 - share) * mix_loss)
        unlabeled_loss = (loss * used).sum() / used.sum().clamp_min(1)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
        return labeled_loss + options.unlabeled_weight * unlabeled_loss, (pseudo._replace(weight=used), state)

    @staticmethod
    def _leave_out_unconfident(
        confident: Tensor, batch: Batch, images: list[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Exclude images without a confident pseudo-label from a pass's batch statistics, without a change of shapes.

        `torch.func.vmap` over clients forbids shapes that depend on data. So each unconfident image is replaced by the
        first confident one, which keeps activations finite, and masked like padding.

        Args:
            confident: (b,) bool.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            images: groups of unlabeled images, (b, C, H, W) each.

        Returns:
            The masks of the labeled images and of each group, and the groups.
        """
        positions = torch.arange(len(confident), device=confident.device)
        # argmax returns the first of equal values, here the first confident image.
        first_confident = confident.int().argmax()
        index = torch.where(confident, positions, first_confident)
        labeled_mask = torch.ones_like(batch.y, dtype=torch.bool) if batch.x_real is None else batch.x_real
        masks = (labeled_mask, *[confident] * len(images))
        return masks, [group[index] for group in images]

    def _probabilities(self, logits: Tensor, prior: Tensor | None) -> Tensor:
        """Turn logits (b, classes) into probabilities, debiased by the prior (classes,) if `debias` is set."""
        if self.options.debias and prior is not None:
            logits = debias_logits(logits, prior)
        return logits.softmax(-1)


def split_kernels(params: Tree) -> tuple[Tree, Tree]:
    """Split parameters into the kernels of all layers but the head, and biases, normalizations and the head."""
    kernel: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for path, leaf in tree.flatten(params).items():
        is_kernel = leaf.dim() > 1 and not path.startswith("head/")
        (kernel if is_kernel else rest)[path] = leaf
    return tree.unflatten(kernel), tree.unflatten(rest)


def merge(rest: Tree, kernel: Tree) -> Tree:
    """Join the two trees of `split_kernels`."""
    return tree.unflatten({**tree.flatten(rest), **tree.flatten(kernel)})


ROWS = (
    MethodEntry("semifl", "SemiFL", "SemiFL, NeurIPS 2022",
                "clients train on confident pseudo-labels, then the server on its labels", SemiFL()),
    MethodEntry("semifl-feddpl", "SemiFL + FedDPL", "SemiFL, NeurIPS 2022; FedDB, IJCAI 2024",
                "SemiFL with predictions divided by each client's mean prediction", SemiFL(debias=True)),
    MethodEntry("fedmatch-semifl", "FedMatch, SemiFL's version", "SemiFL, NeurIPS 2022, Table 1",
                "half of each kernel learns from labels, half from confident pseudo-labels; no helpers, no penalties",
                SemiFL(labels="step", mix_weight=0.0, halves=True)),
)  # fmt: skip
