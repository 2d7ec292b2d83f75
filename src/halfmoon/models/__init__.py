"""Networks as pure functions of their parameters."""

from halfmoon.models.network import Network, forward, track
from halfmoon.models.resnet9 import ResNet9
from halfmoon.models.small import SmallCNN

NETWORKS = {"resnet9": ResNet9, "small": SmallCNN}

__all__ = ["NETWORKS", "Network", "ResNet9", "SmallCNN", "forward", "track"]
