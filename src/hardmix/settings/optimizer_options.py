"""The optimizer's settings. Imports no torch."""

from dataclasses import dataclass

from hardmix.errors import InputError
from hardmix.settings.bounds import check_above, check_at_least, check_between
from hardmix.settings.facts import setting
from hardmix.settings.named_choices import OptimizerName, Schedule


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: OptimizerName = setting("sgd", label="{}", name="optimizer", later=True)
    """SGD as in official MoCo, LARS for large batches (You et al. 2017), or AdamW."""
    lr: float = setting(0.03, label="learning rate {}", name="learning rate")
    """Initial learning rate; the paper uses 0.03 for batches of 128 and of 256."""
    trunk_lr: float | None = setting(None, later=True, label="trunk's learning rate x {}")
    """Factor on optimizer.lr for the trunk. Unset: 0.1 with model.init, otherwise 1."""
    momentum: float = setting(0.9, name="optimizer momentum")
    """Momentum of SGD and LARS. The key encoder's momentum is model.key_momentum."""
    betas: tuple[float, ...] = setting((0.9, 0.999), later=True)
    """The two decay rates of AdamW's running means."""
    weight_decay: float = 1e-4
    """Weight decay, applied as optimizer.decay_all says."""
    decay_all: bool = setting(True, name="weight decay on norms and biases", later=True)
    """Apply weight decay to norms and biases too, as official MoCo does. With LARS, parameters
    without decay are not rescaled either."""
    clip: float | None = setting(None, name="largest gradient norm", later=True)
    """Clip the gradient to this norm. Unset: no clipping."""
    warm_up_epochs: float = setting(0, name="learning-rate warm-up epochs", later=True)
    """Epochs over which the learning rate rises linearly from 0 before the schedule begins."""
    schedule: Schedule = "cosine"
    """MoCo-v2's cosine, updated once per epoch, or MoCo-v1's step schedule."""
    milestones: tuple[int, ...] = setting((120, 160), name="milestones of the step schedule")
    """Epochs at which the step schedule divides the learning rate by ten."""

    def __post_init__(self) -> None:
        check_above(self, "optimizer", lr=0, clip=0)
        check_at_least(self, "optimizer", trunk_lr=0, weight_decay=0, warm_up_epochs=0)
        check_between(self, "optimizer", 0.0, 1.0, "momentum")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"optimizer.betas={self.betas} must be two numbers, at least 0 and below 1: the"
                " decay rates of AdamW's running means."
            )
