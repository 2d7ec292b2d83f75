# Learn to write a custom loss and a custom method, and to compare them.
# %% [markdown]
# # A custom objective and a custom method
# An objective computes the loss of a model on a minibatch. This one is entropy minimization (Grandvalet and Bengio
# 2004).
# %%
from dataclasses import dataclass, field

import halfmoon
from halfmoon.api.types import UpdateRequirements
from halfmoon.core import tree
from halfmoon.methods.averaging import ModelAveraging
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import Objective, StepResult
from halfmoon.methods.objectives.base import as_pseudo_labels, labeled_cross_entropy
from halfmoon.models import forward


@dataclass(frozen=True)
class Entropy(Objective):
    unlabeled_weight: float = 0.1

    @property
    def requirements(self):
        return UpdateRequirements(views=("weak",))

    def __call__(self, task, params, stats, batch, aux=None, cached=None):
        images = (batch.x, batch.u["weak"])
        (labeled, unlabeled), _, moments = forward(task.network, params, task.statistics == "joint", images)
        entropy = -(unlabeled.softmax(-1) * unlabeled.log_softmax(-1)).sum(-1).mean()
        loss = labeled_cross_entropy(labeled, batch.y) + self.unlabeled_weight * entropy
        return loss, StepResult(moments, (as_pseudo_labels(unlabeled.softmax(-1)),))


config = halfmoon.Config(rounds=12, lr=6e-3, steps=6, unlabeled_batch=30, threads=1)
entropy = halfmoon.run(config, method=Entropy(unlabeled_weight=0.2), run_dir="runs/entropy")
entropy


# %% [markdown]
# A method defines a round. `ModelAveraging` implements FedAvg's server, and you define the client updates. Here clients
# train on the loss above, and the server averages each new model with the previous one.
# %%
@dataclass(frozen=True)
class Slow(ModelAveraging):
    keep: float = 0.5
    objective: Objective = field(default_factory=Entropy)

    def client_updates(self, task):
        return {"train": LocalTraining(task, self.objective)}

    def round(self, task, server, federation):
        average = federation.average("train", server).update
        params = tree.map(lambda old, new: self.keep * old + (1 - self.keep) * new, server["params"], average["params"])
        return {**average, "params": params}


slow = halfmoon.run(config, method=Slow(keep=0.5), run_dir="runs/slow")
slow.plot(axes=entropy.plot().axes[0])
