"""`resnet18` and `resnet50` for ImageNet, and `resnet20` for CIFAR."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from paceline.models.zoo import register_model


def _conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its batch norm."""
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(channels_out)


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """The identity if shapes match, otherwise a 1 × 1 convolution."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(*_conv_norm(channels_in, channels_out, 1, stride))


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels_in, width, 3, stride), nn.ReLU(inplace=True), *_conv_norm(width, width, 3)
        )
        self.shortcut = _shortcut(channels_in, width, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions; the stride is on the 3 × 3, as in ResNet v1.5."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.body = nn.Sequential(
            *_conv_norm(channels_in, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, channels_out, 1),
        )
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs))


class ResNet(nn.Module):
    """A stem, stages of blocks, and a linear classifier. Each stage but the first halves the resolution."""

    def __init__(
        self,
        stem: nn.Module,
        block: type[BasicBlock] | type[Bottleneck],
        depths: list[int],
        widths: list[int],
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        channels = widths[0]
        blocks: list[nn.Module] = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for number in range(depth):
                blocks.append(block(channels, width, stride=2 if stage and number == 0 else 1))
                channels = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        features = self.blocks(self.stem(inputs))
        logits = self.head(functional.adaptive_avg_pool2d(features, 1).flatten(1))
        if targets is None:
            return logits
        return {"loss": functional.cross_entropy(logits, targets)}


def _small_stem(width: int) -> nn.Module:
    return nn.Sequential(*_conv_norm(3, width, 3), nn.ReLU(inplace=True))


def _imagenet_stem(width: int) -> nn.Module:
    return nn.Sequential(*_conv_norm(3, width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


@register_model("resnet20")
def resnet20(classes: int = 10) -> ResNet:
    return ResNet(_small_stem(16), BasicBlock, [3, 3, 3], [16, 32, 64], classes)


@register_model("resnet18")
def resnet18(classes: int = 1000) -> ResNet:
    return ResNet(_imagenet_stem(64), BasicBlock, [2, 2, 2, 2], [64, 128, 256, 512], classes)


@register_model("resnet50")
def resnet50(classes: int = 1000) -> ResNet:
    return ResNet(_imagenet_stem(64), Bottleneck, [3, 4, 6, 3], [64, 128, 256, 512], classes)
