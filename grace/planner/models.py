"""The tensors of well-known models, computed from their architectures, with FLOPs per tensor.

The order is that of a backward pass. FLOPs count one matrix product for the gradient of the input and one for that of
the weight: 4 times elements times positions (pixels, tokens) times samples; for biases and norms, the cost of reading
their activations. They only serve to apportion a backward pass that was measured or assumed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from grace.planner.profile import Profile, apportioned

ASSUMED_FLOPS = 20e12
"""Assumed FLOPs per second of an unmeasured backward pass: roughly a GPU of 2020."""


class Layer(NamedTuple):
    """A tensor, in the order of a forward pass."""

    name: str
    shape: tuple[int, ...]
    flops: float
    """FLOPs of this tensor's part of the backward pass, per sample."""


def _weight(name: str, shape: tuple[int, ...], positions: int) -> Layer:
    size = 1
    for length in shape:
        size *= length
    return Layer(name, shape, 4.0 * size * positions)


def _vector(name: str, length: int, positions: int) -> Layer:
    return Layer(name, (length,), 4.0 * length * positions)


def _pair(name: str, out: int, into: int, positions: int = 1) -> list[Layer]:
    return [_weight(f"{name}.weight", (out, into), positions), _vector(f"{name}.bias", out, positions)]


def _norm(name: str, length: int, positions: int) -> list[Layer]:
    return [_vector(f"{name}.weight", length, positions), _vector(f"{name}.bias", length, positions)]


def vgg16() -> list[Layer]:
    """VGG-16 for ImageNet: 32 tensors, 138,357,544 elements. Simonyan and Zisserman, 2015, table 1, D."""
    found: list[Layer] = []
    into, side = 3, 224
    for stage, (blocks, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for block in range(1, blocks + 1):
            found.append(_weight(f"conv{stage}_{block}.weight", (width, into, 3, 3), side * side))
            found.append(_vector(f"conv{stage}_{block}.bias", width, side * side))
            into = width
        side //= 2
    into *= side * side
    for number, width in enumerate((4096, 4096, 1000), 6):
        found += _pair(f"fc{number}", width, into)
        into = width
    return found


def _resnet(blocks: tuple[int, ...]) -> list[Layer]:
    found: list[Layer] = []

    def convolution(name: str, out: int, into: int, kernel: int, side: int) -> None:
        found.append(_weight(f"{name}.weight", (out, into, kernel, kernel), side * side))
        found.extend(_norm(f"{name}.norm", out, side * side))

    convolution("stem", 64, 3, 7, 112)
    into, side = 64, 56
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), 1):
        for block in range(count):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.reduce", width, into, 1, side * 2 if stage > 1 and block == 0 else side)
            convolution(f"{name}.middle", width, width, 3, side)
            convolution(f"{name}.expand", 4 * width, width, 1, side)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, into, 1, side)
            into = 4 * width
        side //= 2
    return found + _pair("head", 1000, into)


def resnet50() -> list[Layer]:
    """ResNet-50 for ImageNet: 161 tensors, 25,557,032 elements. He et al., 2016, table 1."""
    return _resnet((3, 4, 6, 3))


def resnet101() -> list[Layer]:
    """ResNet-101 for ImageNet: 314 tensors, 44,549,160 elements. He et al., 2016, table 1."""
    return _resnet((3, 4, 23, 3))


def bert_base(tokens: int = 128) -> list[Layer]:
    """BERT-base with the heads of its pre-training: 206 tensors, 110,106,428 elements. Devlin et al., 2019.

    The output layer shares the word embedding's weight; Espresso's table 5 counts 207 tensors. A sample: 128 tokens.
    """
    width, inner, words = 768, 3072, 30522
    found = [
        Layer("embeddings.word", (words, width), 4.0 * words * width * tokens * 0.15),  # scores of masked tokens
        Layer("embeddings.position", (512, width), 4.0 * width * tokens),
        Layer("embeddings.type", (2, width), 4.0 * width * tokens),
        *_norm("embeddings.norm", width, tokens),
    ]
    for layer in range(12):
        name = f"layer{layer}"
        for part in ("query", "key", "value", "output"):
            found += _pair(f"{name}.attention.{part}", width, width, tokens)
        found += _norm(f"{name}.attention.norm", width, tokens)
        found += _pair(f"{name}.inner", inner, width, tokens) + _pair(f"{name}.outer", width, inner, tokens)
        found += _norm(f"{name}.norm", width, tokens)
    found += _pair("pooler", width, width) + _pair("next_sentence", 2, width)
    found += _pair("words.transform", width, width, tokens) + _norm("words.norm", width, tokens)
    return [*found, _vector("words.bias", words, tokens)]


def gpt2(tokens: int = 1024) -> list[Layer]:
    """GPT-2 small, output tied to its embedding: 148 tensors, 124,439,808 elements. Radford et al., 2019, table 2.

    A sample: 1024 tokens.
    """
    width, words = 768, 50257
    found = [
        Layer("embeddings.word", (words, width), 4.0 * words * width * tokens),  # scores of all words
        Layer("embeddings.position", (1024, width), 4.0 * width * tokens),
    ]
    for layer in range(12):
        name = f"layer{layer}"
        found += _norm(f"{name}.attention.norm", width, tokens)
        found += _pair(f"{name}.attention.projections", 3 * width, width, tokens)
        found += _pair(f"{name}.attention.output", width, width, tokens)
        found += _norm(f"{name}.norm", width, tokens)
        found += _pair(f"{name}.inner", 4 * width, width, tokens) + _pair(f"{name}.outer", width, 4 * width, tokens)
    return found + _norm("norm", width, tokens)


def ugatit(side: int = 256) -> list[Layer]:
    """U-GAT-IT, two generators and four discriminators: 148 tensors, 670,761,088 elements. Kim et al., 2020, appendix.

    A sample: an image of 256 x 256 in each direction. All networks are counted as if one loss passed through them once.
    """
    found: list[Layer] = []
    for way in ("a_to_b", "b_to_a"):
        found += _generator(f"generator.{way}", side)
    for way in ("a", "b"):
        for scale, widths in (("global", (64, 128, 256, 512, 1024, 2048)), ("local", (64, 128, 256, 512))):
            found += _discriminator(f"discriminator.{scale}.{way}", side, widths)
    return found


def _generator(name: str, side: int) -> list[Layer]:
    # Returns convolutions without biases, with four residual blocks of width 256 on both sides of an attention map.
    def convolution(part: str, out: int, into: int, kernel: int, pixels: int) -> Layer:
        return _weight(f"{name}.{part}.weight", (out, into, kernel, kernel), pixels * pixels)

    quarter, found = side // 4, [convolution("stem", 64, 3, 7, side)]
    for number, width in enumerate((64, 128), 1):
        found.append(convolution(f"down{number}", 2 * width, width, 3, side >> number))
    for block in range(4):
        found += [convolution(f"encoder{block}.{half}", 256, 256, 3, quarter) for half in (1, 2)]
    found += [_weight(f"{name}.attention.{pool}.weight", (1, 256), 1) for pool in ("average", "maximum")]
    found.append(convolution("attention.mix", 256, 512, 1, quarter))
    found.append(_vector(f"{name}.attention.mix.bias", 256, quarter * quarter))
    found.append(_weight(f"{name}.style.1.weight", (256, 256 * quarter * quarter), 1))
    found += [_weight(f"{name}.style.{part}.weight", (256, 256), 1) for part in ("2", "gamma", "beta")]
    for block in range(4):
        for half in (1, 2):
            found.append(convolution(f"decoder{block}.{half}", 256, 256, 3, quarter))
            found.append(_vector(f"{name}.decoder{block}.norm{half}.rho", 256, quarter * quarter))
    for number, width in enumerate((256, 128), 1):
        pixels = quarter << number
        found.append(convolution(f"up{number}", width // 2, width, 3, pixels))
        found += [_vector(f"{name}.up{number}.norm.{v}", width // 2, pixels * pixels) for v in ("rho", "gamma", "beta")]
    return [*found, convolution("image", 3, 64, 7, side)]


def _discriminator(name: str, side: int, widths: tuple[int, ...]) -> list[Layer]:
    # Returns convolutions of 4 x 4 with biases. All but the last have stride 2.
    found, into = [], 3
    for number, width in enumerate(widths):
        side = side // 2 if number < len(widths) - 1 else side - 1
        found.append(_weight(f"{name}.{number}.weight", (width, into, 4, 4), side * side))
        found.append(_vector(f"{name}.{number}.bias", width, side * side))
        into = width
    found += [_weight(f"{name}.attention.{pool}.weight", (1, into), 1) for pool in ("average", "maximum")]
    found += [_weight(f"{name}.attention.mix.weight", (into, 2 * into, 1, 1), side * side)]
    found += [_vector(f"{name}.attention.mix.bias", into, side * side)]
    return [*found, _weight(f"{name}.score.weight", (1, into, 4, 4), (side - 1) ** 2)]


def lstm(steps: int = 35) -> list[Layer]:
    """A two-layer LSTM language model of width 1500 on WikiText-2, output tied to its embedding: 10 tensors,
    85,974,278 elements. Merity et al., 2017. A sample: 35 words.
    """
    width, words = 1500, 33278
    found = [Layer("embedding", (words, width), 4.0 * words * width * steps)]
    for layer in range(2):
        for part in ("input", "hidden"):
            found += _pair(f"layer{layer}.{part}", 4 * width, width, steps)
    return [*found, _vector("words.bias", words, steps)]


MODELS: dict[str, tuple[Callable[[], list[Layer]], int]] = {
    "vgg16": (vgg16, 32),
    "resnet50": (resnet50, 64),
    "resnet101": (resnet101, 32),
    "bert-base": (bert_base, 8),
    "gpt2": (gpt2, 1),
    "ugatit": (ugatit, 2),
    "lstm": (lstm, 20),
}
"""By name: a function that returns the tensors, and the default number of samples per step and worker."""


def profile(name: str, backward: float | None = None, batch: int | None = None) -> Profile:
    """A profile of one of `MODELS`; the forward pass is assumed to take half as long as the backward pass.

    ``backward``: measured seconds of a backward pass. By default it is estimated: the FLOPs of ``batch`` samples at
    `ASSUMED_FLOPS`. ValueError for an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}: choose from {', '.join(MODELS)}, or give a file with a profile")
    layers, usual = MODELS[name]
    found = layers()[::-1]
    batch = usual if batch is None else batch
    source = "measured as a whole, apportioned by FLOPs"
    if backward is None:
        backward = batch * sum(layer.flops for layer in found) / ASSUMED_FLOPS
        source = f"assumed: FLOPs of {batch} samples at {ASSUMED_FLOPS / 1e12:g} TFLOP/s"
    made = apportioned(found, backward, source)
    return Profile(made.tensors, made.source, backward / 2)
