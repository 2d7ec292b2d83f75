"""FedDure's local iteration as a textbook writes it: modules, `torch.optim`, and double back-propagation.

An oracle, and the other side of the benchmark: nothing in it comes from the library.
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

    Economical, Eq. 1, 6, 7, 8 and 9 share the local model's forward pass, and Eq. 7 to 9 one backward pass through
    their sum. With `literal` each equation is written by itself, with its own forward pass of the local model and,
    where it has a gradient, its own backward pass: the same numbers for more work. Where batch statistics are joint,
    each of these passes has to hold the labeled, strong and weak images."""

    local: nn.Module
    regulator: nn.Module | None
    optimizer: type[torch.optim.Optimizer]
    lr: float
    joint: bool = True
    product: bool = True
    seen: str = "logits"
    coarse: bool = True
    threshold: float = 0.6
    running_labels: bool = False
    running_judge: bool = False
    plain_student: bool = False
    judge_shift: Tensor | None = None
    literal: bool = False

    def __post_init__(self) -> None:
        self.student = copy.deepcopy(self.local)
        self.start = copy.deepcopy(self.local)
        self.local_optimizer = self.optimizer(self.local.parameters(), lr=self.lr)
        student_optimizer = torch.optim.SGD if self.plain_student else self.optimizer
        self.student_optimizer = student_optimizer(self.student.parameters(), lr=self.lr)
        if self.regulator is not None:
            self.regulator_optimizer = self.optimizer(self.regulator.parameters(), lr=self.lr)
        self.hypergradient: list[Tensor] = []

    def weigh(self, z: Tensor) -> Tensor:
        assert self.regulator is not None
        if self.seen == "softmax":
            z = z.softmax(-1)
        elif self.seen == "centered":
            z = z @ (torch.eye(z.shape[1], dtype=z.dtype) - 1 / z.shape[1])  # the projection that removes the mean
        return self.regulator(z).squeeze(-1)

    def weighted(self, z: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(z, label, reduction="none")
        if self.regulator is None:
            return loss.mean()
        return (self.weigh(z if self.product else z.detach()) * loss).mean()

    def look(self, net: nn.Module, params: dict[str, Tensor], x: Tensor, weak: Tensor, strong: Tensor):
        """Return the logits of labeled, weak and strong images of one training pass (or three)."""
        call = lambda images: functional_call(net, params, (images,))  # noqa: E731
        if self.running_labels:
            net.eval()
            with torch.no_grad():
                guess = call(weak)
            net.train()
            if self.joint:
                both = call(torch.cat([x, strong]))
                return both[: len(x)], guess, both[len(x) :]
            return call(x), guess, call(strong)
        if self.joint:
            every = call(torch.cat([x, strong, weak]))
            return every[: len(x)], every[len(x) + len(strong) :].detach(), every[len(x) : len(x) + len(strong)]
        guess = call(weak).detach()
        return call(x), guess, call(strong)

    def pseudo_label(self, net: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the labeled loss of a network whose own running statistics stay as they are."""
        if self.running_judge:
            stats = {k: v for k, v in self.before.items() if "running" in k or "num" in k}
            net.eval()
            logits = functional_call(net, {**params, **stats}, (x,))
            net.train()
        else:
            logits = functional_call(net, params, (x,))
        return F.cross_entropy(logits if self.judge_shift is None else logits + self.judge_shift, y)

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Tensor]:
        """Take one iteration; return d, the mean of m, and the loss."""
        self.before = {k: v.clone() for k, v in self.local.state_dict().items()}
        if self.literal:
            return self._step_by_equation(x, y, weak, strong)
        theta = dict(self.local.named_parameters())
        labeled, guess, loud = self.look(self.local, theta, x, weak, strong)
        confidence, label = guess.softmax(-1).max(-1)
        if self.regulator is not None:
            self._teach_regulator(x, y, weak, strong, label)
            m = self.weigh(loud).detach()
        else:
            m = (confidence >= self.threshold).to(loud.dtype)
        d = loud.new_zeros(())
        if self.coarse:
            d = self._teach_student(x, y, strong, label)
        loss = F.cross_entropy(labeled, y) + ((m + d) * F.cross_entropy(loud, label, reduction="none")).mean()
        self.local_optimizer.zero_grad()
        loss.backward()
        self.local_optimizer.step()
        return {"d": d, "m": m.mean(), "loss": loss.detach()}

    def _step_by_equation(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Tensor]:
        views = {"labeled": x, "strong": strong, "weak": weak}
        with torch.no_grad():
            guess = self._alone("weak", views, not self.running_labels)  # Eq. 1
        confidence, label = guess.softmax(-1).max(-1)
        if self.regulator is not None:
            self._teach_regulator(x, y, weak, strong, label)  # Eq. 4 and 5
        d = x.new_zeros(())
        if self.coarse:
            d = self._teach_student(x, y, strong, label)  # Eq. 2 and 3
        m = (confidence >= self.threshold).to(x.dtype)
        if self.regulator is not None:
            with torch.no_grad():
                m = self.weigh(self._alone("strong", views, False))  # Eq. 6
        theta = list(self.local.parameters())
        total = x.new_zeros(())
        self.local_optimizer.zero_grad()
        gradients = []
        for equation in (9, 7, 8):  # the order in which the other form tracks its statistics
            if equation == 9:
                loss = F.cross_entropy(self._alone("labeled", views, not self.joint or self.running_labels), y)
            else:
                z = self._alone("strong", views, equation == 7 and not self.joint)
                loss = ((m if equation == 7 else d) * F.cross_entropy(z, label, reduction="none")).mean()
            gradients.append(torch.autograd.grad(loss, theta))
            total = total + loss.detach()
        for p, *each in zip(theta, *gradients, strict=True):
            p.grad = each[0].add_(each[1]).add_(each[2])
        self.local_optimizer.step()
        return {"d": d, "m": m.mean(), "loss": total}

    def _alone(self, which: str, views: dict[str, Tensor], tracked: bool) -> Tensor:
        """Return the local model's logits of one view, from a pass for it alone; a tracked one moves statistics."""
        state = {k: v if tracked else v.clone() for k, v in self.local.named_buffers()}
        state |= dict(self.local.named_parameters())
        if which == "weak" and self.running_labels:
            self.local.eval()
            logits = functional_call(self.local, state, (views["weak"],))
            self.local.train()
            return logits
        members = [name for name in views if name != "weak" or not self.running_labels] if self.joint else [which]
        logits = functional_call(self.local, state, (torch.cat([views[name] for name in members]),))
        return dict(zip(members, logits.split([len(views[name]) for name in members]), strict=True))[which]

    def _teach_regulator(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor, label: Tensor) -> None:
        assert self.regulator is not None
        net = self.student if self.coarse else copy.deepcopy(self.local)
        if not self.coarse:
            net.load_state_dict(self.before)
        params = dict(net.named_parameters())
        if self.coarse or not self.joint:
            z = functional_call(net, params, (strong,))
        else:
            z = self.look(net, params, x, weak, strong)[2]
        gradient = torch.autograd.grad(self.weighted(z, label), list(params.values()), create_graph=True)
        virtual = {k: p - self.lr * g for (k, p), g in zip(params.items(), gradient, strict=True)}
        loss = self.pseudo_label(net, virtual, x, y)
        self.hypergradient = list(torch.autograd.grad(loss, list(self.regulator.parameters())))
        for p, g in zip(self.regulator.parameters(), self.hypergradient, strict=True):
            p.grad = g.clone()  # the student's backward pass below adds to it
        self.regulator_optimizer.step()

    def _teach_student(self, x: Tensor, y: Tensor, strong: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.pseudo_label(self.student, dict(self.student.named_parameters()), x, y)
        self.student_optimizer.zero_grad()
        self.weighted(self.student(strong), label).backward()
        self.student_optimizer.step()
        with torch.no_grad():
            return before - self.pseudo_label(self.student, dict(self.student.named_parameters()), x, y)
