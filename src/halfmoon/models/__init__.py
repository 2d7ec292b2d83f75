"""Networks as pure functions of their parameters, and the files of trained ones."""

from halfmoon.models.chains import ResNet9, SmallCNN
from halfmoon.models.network import Network, forward, mark_if_any_real, track
from halfmoon.models.passes import Norm
from halfmoon.models.resnet import ResNet8, ResNet18, ResNet18ImageNet, WideResNet
from halfmoon.models.vit import VisionTransformer

NETWORKS = {
    "resnet8": ResNet8,
    "resnet9": ResNet9,
    "resnet18": ResNet18,
    "resnet18-imagenet": ResNet18ImageNet,
    "small": SmallCNN,
    "vit": VisionTransformer,
    "wrn": WideResNet,
}

__all__ = [
    "NETWORKS",
    "Network",
    "Norm",
    "ResNet8",
    "ResNet9",
    "ResNet18",
    "ResNet18ImageNet",
    "SmallCNN",
    "VisionTransformer",
    "WideResNet",
    "forward",
    "mark_if_any_real",
    "track",
]
