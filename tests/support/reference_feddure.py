"""Implement FedDure's local iteration with modules, `torch.optim` and double back-propagation.

Reference for the tests and the benchmark. It shares no code with the library.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


@dataclass
class ReferenceFedDure:
    """The local model, C-reg and F-reg of one client, each with its optimizer.

    By default Eq. 1, 6, 7, 8 and 9 share one forward pass of the local model, and Eq. 7 to 9 one backward pass through
    their sum. With `literal` each equation has a separate forward pass and, if it has a gradient, a separate backward
    pass: the same numbers for more work. With joint batch statistics each pass contains the labeled, strong and weak
    images.

    Attributes:
        local: the local model.
        regulator: F-reg, which weights pseudo-labels; None to use the threshold instead.
        optimizer: class of the optimizers.
        lr: learning rate.
        joint: whether batch statistics are computed over all views together.
        product: whether C-reg's gradient passes through the weights.
        regulator_input: "logits", "softmax" or "centered".
        coarse: whether to use C-reg.
        threshold: minimum confidence of a pseudo-label, without F-reg.
        running_labels: compute pseudo-labels with running statistics.
        running_labeled_loss: compute the labeled losses of C-reg with running statistics.
        plain_student: update C-reg with plain SGD.
        label_log_shares: added to the logits of the labeled losses of C-reg.
        literal: whether each equation has a separate pass.
    """

    local: nn.Module
    regulator: nn.Module | None
    optimizer: type[torch.optim.Optimizer]
    lr: float
    joint: bool = True
    product: bool = True
    regulator_input: str = "logits"
    coarse: bool = True
    threshold: float = 0.6
    running_labels: bool = False
    running_labeled_loss: bool = False
    plain_student: bool = False
    label_log_shares: Tensor | None = None
    literal: bool = False

    def __post_init__(self) -> None:
        # C-reg and the local model start from the received model, each with its optimizer state.
        self.student = copy.deepcopy(self.local)
        self.start = copy.deepcopy(self.local)
        self.local_optimizer = self.optimizer(self.local.parameters(), lr=self.lr)
        student_optimizer = torch.optim.SGD if self.plain_student else self.optimizer
        self.student_optimizer = student_optimizer(self.student.parameters(), lr=self.lr)
        if self.regulator is not None:
            self.regulator_optimizer = self.optimizer(self.regulator.parameters(), lr=self.lr)
        self.hypergradient: list[Tensor] = []

    def compute_weights(self, z: Tensor) -> Tensor:
        """Return F-reg's weight m of each row of logits."""
        assert self.regulator is not None
        if self.regulator_input == "softmax":
            z = z.softmax(-1)
        elif self.regulator_input == "centered":
            z = z @ (torch.eye(z.shape[1], dtype=z.dtype) - 1 / z.shape[1])  # the projection that removes the mean
        return self.regulator(z).squeeze(-1)

    def compute_weighted_loss(self, z: Tensor, label: Tensor) -> Tensor:
        """Return the mean cross-entropy of pseudo-labels, weighted by F-reg."""
        loss = F.cross_entropy(z, label, reduction="none")
        if self.regulator is None:
            return loss.mean()
        return (self.compute_weights(z if self.product else z.detach()) * loss).mean()

    def forward_views(self, net: nn.Module, params: dict[str, Tensor], x: Tensor, weak: Tensor, strong: Tensor):
        """Return the logits of labeled, weak and strong images, of one pass or of a pass each."""
        call = lambda images: functional_call(net, params, (images,))  # noqa: E731
        if self.running_labels:
            net.eval()
            with torch.no_grad():
                pseudo_logits = call(weak)
            net.train()
            if self.joint:
                labeled_and_strong = call(torch.cat([x, strong]))
                return labeled_and_strong[: len(x)], pseudo_logits, labeled_and_strong[len(x) :]
            return call(x), pseudo_logits, call(strong)
        if self.joint:
            logits = call(torch.cat([x, strong, weak]))
            return logits[: len(x)], logits[len(x) + len(strong) :].detach(), logits[len(x) : len(x) + len(strong)]
        pseudo_logits = call(weak).detach()
        return call(x), pseudo_logits, call(strong)

    def compute_labeled_loss(self, net: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of labeled images."""
        if self.running_labeled_loss:
            # The running statistics from before this step: its own passes have changed the module's already.
            stats = {k: v for k, v in self.state_before_step.items() if "running" in k or "num" in k}
            net.eval()
            logits = functional_call(net, {**params, **stats}, (x,))
            net.train()
        else:
            logits = functional_call(net, params, (x,))
        return F.cross_entropy(logits if self.label_log_shares is None else logits + self.label_log_shares, y)

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Tensor]:
        """Run one iteration, and return C-reg's reward d, the mean weight m and the loss."""
        self.state_before_step = {k: v.clone() for k, v in self.local.state_dict().items()}
        if self.literal:
            return self._step_by_equation(x, y, weak, strong)
        theta = dict(self.local.named_parameters())
        labeled, pseudo_logits, strong_logits = self.forward_views(self.local, theta, x, weak, strong)
        confidence, label = pseudo_logits.softmax(-1).max(-1)
        if self.regulator is not None:
            self._update_regulator(x, y, weak, strong, label)
            m = self.compute_weights(strong_logits).detach()
        else:
            m = (confidence >= self.threshold).to(strong_logits.dtype)
        d = strong_logits.new_zeros(())
        if self.coarse:
            d = self._update_student(x, y, strong, label)
        loss = F.cross_entropy(labeled, y) + ((m + d) * F.cross_entropy(strong_logits, label, reduction="none")).mean()
        self.local_optimizer.zero_grad()
        loss.backward()
        self.local_optimizer.step()
        return {"d": d, "m": m.mean(), "loss": loss.detach()}

    def _step_by_equation(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Tensor]:
        views = {"labeled": x, "strong": strong, "weak": weak}
        with torch.no_grad():
            pseudo_logits = self._forward_view("weak", views, not self.running_labels)  # Eq. 1
        confidence, label = pseudo_logits.softmax(-1).max(-1)
        if self.regulator is not None:
            self._update_regulator(x, y, weak, strong, label)  # Eq. 4 and 5
        d = x.new_zeros(())
        if self.coarse:
            d = self._update_student(x, y, strong, label)  # Eq. 2 and 3
        m = (confidence >= self.threshold).to(x.dtype)
        if self.regulator is not None:
            with torch.no_grad():
                m = self.compute_weights(self._forward_view("strong", views, False))  # Eq. 6
        theta = list(self.local.parameters())
        total = x.new_zeros(())
        self.local_optimizer.zero_grad()
        gradients = []
        for equation in (9, 7, 8):  # the shared pass updates its running statistics in this order
            if equation == 9:
                loss = F.cross_entropy(self._forward_view("labeled", views, not self.joint or self.running_labels), y)
            else:
                z = self._forward_view("strong", views, equation == 7 and not self.joint)
                loss = ((m if equation == 7 else d) * F.cross_entropy(z, label, reduction="none")).mean()
            gradients.append(torch.autograd.grad(loss, theta))
            total = total + loss.detach()
        for p, *gradients_of_p in zip(theta, *gradients, strict=True):
            p.grad = gradients_of_p[0].add_(gradients_of_p[1]).add_(gradients_of_p[2])
        self.local_optimizer.step()
        return {"d": d, "m": m.mean(), "loss": total}

    def _forward_view(self, view: str, views: dict[str, Tensor], tracked: bool) -> Tensor:
        """Return the local model's logits of one view from a separate pass.

        Args:
            view: "labeled", "strong" or "weak".
            views: images by view.
            tracked: whether the pass updates the running statistics.
        """
        state = {k: v if tracked else v.clone() for k, v in self.local.named_buffers()}
        state |= dict(self.local.named_parameters())
        if view == "weak" and self.running_labels:
            self.local.eval()
            logits = functional_call(self.local, state, (views["weak"],))
            self.local.train()
            return logits
        members = [name for name in views if name != "weak" or not self.running_labels] if self.joint else [view]
        logits = functional_call(self.local, state, (torch.cat([views[name] for name in members]),))
        return dict(zip(members, logits.split([len(views[name]) for name in members]), strict=True))[view]

    def _update_regulator(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor, label: Tensor) -> None:
        assert self.regulator is not None
        net = self.student if self.coarse else copy.deepcopy(self.local)
        if not self.coarse:
            net.load_state_dict(self.state_before_step)
        params = dict(net.named_parameters())
        if self.coarse or not self.joint:
            z = functional_call(net, params, (strong,))
        else:
            z = self.forward_views(net, params, x, weak, strong)[2]
        gradient = torch.autograd.grad(self.compute_weighted_loss(z, label), list(params.values()), create_graph=True)
        # A step of plain SGD whatever the optimizer is, as part of the graph: F-reg's gradient passes through it.
        virtual = {k: p - self.lr * g for (k, p), g in zip(params.items(), gradient, strict=True)}
        loss = self.compute_labeled_loss(net, virtual, x, y)
        self.hypergradient = list(torch.autograd.grad(loss, list(self.regulator.parameters())))
        for p, g in zip(self.regulator.parameters(), self.hypergradient, strict=True):
            p.grad = g.clone()  # the student's backward pass below adds to it
        self.regulator_optimizer.step()

    def _update_student(self, x: Tensor, y: Tensor, strong: Tensor, label: Tensor) -> Tensor:
        # The reward d of the pseudo-labels: how much a step on them reduces the labeled loss.
        with torch.no_grad():
            before = self.compute_labeled_loss(self.student, dict(self.student.named_parameters()), x, y)
        self.student_optimizer.zero_grad()
        self.compute_weighted_loss(self.student(strong), label).backward()
        self.student_optimizer.step()
        with torch.no_grad():
            return before - self.compute_labeled_loss(self.student, dict(self.student.named_parameters()), x, y)
