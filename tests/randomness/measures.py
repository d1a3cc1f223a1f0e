"""Statistical tests of numbers by place. Each gives the deviations from what independent uniform numbers have, in
standard deviations, and the effect that one standard deviation corresponds to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from randomness.generators import Numbers, Place, dropped

KINDS = ("sample", "step", "call", "scope", "seed")


@dataclass
class Result:
    test: str
    count: float  # numbers, or pairs of them
    deviations: NDArray[numpy.float64]
    effect: str  # what `sigma` is a size of
    sigma: float

    @property
    def worst(self) -> float:
        return float(numpy.abs(self.deviations).max())


def limit(results: list[Result], false_alarms: float = 1e-3) -> float:
    """The deviation that one of all comparisons exceeds with this probability."""
    comparisons = sum(result.deviations.size for result in results)
    return -NormalDist().inv_cdf(false_alarms / comparisons / 2)


def chains(
    numbers: Numbers, kind: str, shape: tuple[int, ...], *, length: int, batch: int, blocks: int
) -> Iterator[Tensor]:
    """`blocks` tensors of (length, batch, *shape): neighbours in `kind`, for each of `batch` samples (or steps)."""
    for block in range(blocks):
        if kind == "sample":
            steps = range(block * batch, (block + 1) * batch)
            yield torch.stack([numbers(Place(step=step), length, shape) for step in steps], 1)
        else:
            base, first = (0, block * length) if kind in ("step", "seed") else (block, 0)
            places = (replace(Place(step=base), **{kind: first + index}) for index in range(length))
            yield torch.stack([numbers(place, batch, shape) for place in places])


def shares(numbers: Numbers, blocks: int, rates: tuple[float, ...], shape: tuple[int, ...] = (64, 1024)) -> Result:
    """How many are dropped."""
    totals = numpy.zeros(len(rates))
    for block in range(blocks):
        own = numbers(Place(step=block), 16, shape)
        totals += [int(dropped(own, p).sum()) for p in rates]
    p, count = numpy.array(rates), blocks * 16 * math.prod(shape)
    deviations = (totals - count * p) / numpy.sqrt(count * p * (1 - p))
    return Result("share that is dropped", count, deviations, "share at p = 0.5", 0.5 / math.sqrt(count))


def bits(numbers: Numbers, blocks: int, shape: tuple[int, ...] = (64, 1024)) -> Result:
    """The share of ones of each bit, and the distribution of each byte."""
    counts = numpy.zeros((4, 256))
    for block in range(blocks):
        own = numbers(Place(step=block), 16, shape).flatten().numpy().view(numpy.uint8).reshape(-1, 4)
        for byte in range(4):
            counts[byte] += numpy.bincount(own[:, byte], minlength=256)
    count = float(counts[0].sum())
    ones = [counts[byte][(numpy.arange(256) >> bit) & 1 == 1].sum() for byte in range(4) for bit in range(8)]
    deviations = [*((numpy.array(ones) - count / 2) / math.sqrt(count / 4)), *map(chi_square, counts)]
    return Result("32 bits, 4 bytes", count, numpy.array(deviations), "share of ones", 0.5 / math.sqrt(count))


def chi_square(counts: NDArray[numpy.float64]) -> float:
    """The deviation of equally likely counts from being equal (Wilson and Hilferty)."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    ratio = ((counts - expected) ** 2).sum() / expected / freedom
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def correlations(
    numbers: Numbers, kind: str, p: float, shape: tuple[int, ...], *, length: int = 8, batch: int = 1, blocks: int = 1
) -> list[Result]:
    """Of elements at every distance, in each of `shape`'s dims: within a mask, and in masks that are neighbours in
    `kind`. Of four elements at the corners of a parallelogram, two in either mask. Distances are circular. The last
    deviation of each is that of the sum of squares over all distances. The mean spectrum of the masks is flat."""
    dims = tuple(range(2, 2 + len(shape)))
    own = cross = corners = numpy.zeros((), numpy.complex128)
    for chain in chains(numbers, kind, shape, length=length, batch=batch, blocks=blocks):
        centred = dropped(chain, p).float().sub_(p).div_(math.sqrt(p * (1 - p)))
        transformed = torch.fft.rfftn(centred, dim=dims)
        own = own + _power(transformed, transformed)
        cross = cross + _power(transformed[:-1], transformed[1:])
        products = torch.fft.rfftn(centred[:-1] * centred[1:], dim=dims)
        corners = corners + _power(products, products)
    size = blocks * batch * math.prod(shape)
    results = [_spectrum(own, size * length // math.prod(shape), shape)]
    for test, total, count in (
        ("within a mask", own, size * length),
        (f"next {kind}", cross, size * (length - 1)),
        (f"four points, next {kind}", corners, size * (length - 1)),
    ):
        deviations = numpy.fft.irfftn(total, s=shape, axes=range(len(shape))) / math.sqrt(count)
        if total is not cross:
            deviations = _without_symmetry(deviations)
        distances = deviations.size if total is cross else deviations.size / 2
        all_distances = ((deviations**2).sum() / deviations.size - 1) / math.sqrt(2 / distances)
        deviations = numpy.append(deviations, all_distances)
        results.append(Result(f"correlation, {test}", count, deviations, "correlation", 1 / math.sqrt(count)))
    for result in results:
        result.test += f", {'×'.join(map(str, shape))}, p = {p}"
    return results


def _spectrum(power: NDArray[numpy.complex128], masks: int, shape: tuple[int, ...]) -> Result:
    """The deviations of the gamma distribution that sums of squares have, by frequency (Wilson and Hilferty)."""
    relative = power[..., 1 : (shape[-1] + 1) // 2].real / masks / math.prod(shape)
    deviations = (numpy.cbrt(relative) - (1 - 1 / (9 * masks))) * 3 * math.sqrt(masks)
    return Result("spectrum", masks * math.prod(shape), deviations.flatten(), "relative power", 1 / math.sqrt(masks))


def _power(first: Tensor, second: Tensor) -> NDArray[numpy.complex128]:
    return (first * second.conj()).sum((0, 1), dtype=torch.complex128).numpy()


def _without_symmetry(deviations: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """A distance of half the size counts each pair twice; distance 0 is no pair."""
    for index in numpy.ndindex(*[2] * deviations.ndim):
        place = tuple(half * size // 2 for half, size in zip(index, deviations.shape, strict=True))
        deviations[place] /= math.sqrt(2)
    deviations[(0,) * deviations.ndim] = 0
    return deviations


def all_pairs(numbers: Numbers, shape: tuple[int, ...], values: int = 4) -> Result:
    """Correlations of every two masks of neighbouring seeds, steps, scopes, calls and samples."""
    grid = numpy.ndindex(values, values, values, values)
    chain = [numbers(Place(seed, step, scope, call), values, shape) for seed, step, scope, call in grid]
    signs = dropped(torch.cat(chain), 0.5).flatten(1).float().mul_(2).sub_(1)
    deviations = (signs @ signs.T / math.sqrt(signs.shape[1])).numpy()
    pairs = deviations[numpy.triu_indices(len(deviations), 1)].astype(numpy.float64)
    return Result("correlation of any two masks", signs.shape[1], pairs, "correlation", signs.shape[1] ** -0.5)


def patterns(numbers: Numbers, kind: str, blocks: int, batch: int = 4, shape: tuple[int, ...] = (64, 256)) -> Result:
    """The frequencies of the 256 patterns of 8 successive elements, p = 0.5. `kind` may be "row" or "column", too."""
    dim = {"row": -2, "column": -1}.get(kind, 0)
    counts = numpy.zeros(256)
    for chain in chains(numbers, kind if dim == 0 else "step", shape, length=8, batch=batch, blocks=blocks):
        packed = numpy.packbits(dropped(chain, 0.5).numpy(), axis=dim)
        counts += numpy.bincount(packed.flatten(), minlength=256)
    count = counts.sum()
    sigma = math.sqrt(5 * math.sqrt(2 * 255) / count) / 5  # chi-square grows with the square of the effect
    deviations = numpy.array([chi_square(counts)])
    return Result(f"patterns of 8, next {kind}", count, deviations, "relative frequency", sigma)


def dispersion(numbers: Numbers, p: float, blocks: int, shape: tuple[int, ...] = (256, 768)) -> Result:
    """The variance of what is dropped in a row, in a column and in a mask, relative to that of independent elements."""
    sums: dict[int, list[NDArray[numpy.float64]]] = {0: [], 1: [], 2: []}
    for block in range(blocks):
        mask = dropped(numbers(Place(step=block), 8, shape), p).numpy()
        for index, dims in enumerate([(2,), (1,), (1, 2)]):
            size = math.prod(mask.shape[dim] for dim in dims)
            sums[index].append((mask.sum(dims).flatten() - size * p) / math.sqrt(size * p * (1 - p)))
    deviations, counts = [], []
    for index, size in enumerate((shape[1], shape[0], math.prod(shape))):
        squares = numpy.concatenate(sums[index]) ** 2
        spread = math.sqrt((2 + (1 - 6 * p * (1 - p)) / (size * p * (1 - p))) / squares.size)
        deviations.append((squares.mean() - 1) / spread)
        counts.append(spread)
    name = f"variance of sums, p = {p}"
    return Result(name, blocks * 8 * math.prod(shape), numpy.array(deviations), "variance of a row's sum", counts[0])


def duplicates(numbers: Numbers, steps: int, rows: int = 1 << 13) -> Result:
    """Equal numbers in one column, and equal pairs of numbers in two columns, over rows, samples and steps."""
    both = torch.cat([numbers(Place(step=step), 8, (rows, 2)).flatten(0, 1) for step in range(steps)])
    count = len(both)
    single = count - len(both[:, 0].unique())
    pairs = count - len((both[:, 0].long() << 32 | both[:, 1].long() & 0xFFFFFFFF).unique())
    expected = count * (count - 1) / 2 / 2**32
    expected -= count * expected / 3 / 2**32  # three equal numbers are two duplicates
    deviations = numpy.array([(single - expected) / math.sqrt(expected), 100.0 * pairs])  # a pair is one in 2**64
    return Result("duplicates over rows", count, deviations, "bits of a row", math.sqrt(1 / expected) / math.log(2))


def ranks(numbers: Numbers, blocks: int, size: int = 32) -> Result:
    """The ranks of square pieces of a mask as matrices over GF(2), p = 0.5."""
    found = numpy.zeros(size + 1)
    for block in range(blocks):
        mask = dropped(numbers(Place(step=block), 16, (8 * size, 8 * size)), 0.5).numpy()
        pieces = mask.reshape(16, 8, size, 8, size).swapaxes(2, 3).reshape(-1, size, size)
        found += numpy.bincount(_rank(pieces), minlength=size + 1)
    full = math.prod(1 - 2.0**-power for power in range(1, 100))
    below = 2 * full
    shares = numpy.array([full, below, 1 - full - below])
    expected = shares * found.sum()
    seen = numpy.array([found[size], found[size - 1], found[: size - 1].sum()])
    deviations = (seen - expected) / numpy.sqrt(expected * (1 - shares))
    return Result("ranks over GF(2)", found.sum(), deviations, "share of full rank", 0.45 / math.sqrt(found.sum()))


def _rank(matrices: NDArray[numpy.bool_]) -> NDArray[numpy.int64]:
    size = matrices.shape[-1]
    weights = numpy.uint64(1) << numpy.arange(size, dtype=numpy.uint64)
    rows = (matrices * weights).sum(-1, dtype=numpy.uint64)
    rank = numpy.zeros(len(rows), dtype=numpy.int64)
    for bit in range(size):
        has = (rows >> numpy.uint64(bit)) & numpy.uint64(1) == 1
        pivot = has.argmax(-1)
        found = has.any(-1)
        chosen = numpy.where(found, numpy.take_along_axis(rows, pivot[:, None], -1)[:, 0], 0).astype(numpy.uint64)
        rows ^= numpy.where(has, chosen[:, None], numpy.uint64(0))  # the pivot itself becomes zero
        rank += found
    return rank


def avalanche(numbers: Numbers, blocks: int, shape: tuple[int, ...] = (16, 16, 256)) -> Result:
    """How often each of the upper 24 bits changes with one bit of seed, step, call, sample or a coordinate."""
    widths = {"seed": 63, "step": 40, "call": 20, "sample": 40}
    flips = [(field, bit) for field, width in widths.items() for bit in range(width)]
    coordinates = [(dim, bit) for dim, size in enumerate(shape) for bit in range(size.bit_length() - 1)]
    changed = numpy.zeros((len(flips) + len(coordinates), 24))
    for block in range(blocks):
        place = Place(seed=block, step=block)
        own = numbers(place, 1, shape)
        others = [numbers(replace(place, **{name: getattr(place, name) ^ (1 << bit)}), 1, shape) for name, bit in flips]
        for dim, bit in coordinates:
            others.append(own.index_select(dim + 1, torch.arange(shape[dim]) ^ (1 << bit)))
        for row, other in zip(changed, others, strict=True):
            different = (own ^ other).flatten().numpy()
            row += numpy.unpackbits(different.view(numpy.uint8).reshape(-1, 4)[:, 1:], axis=1).sum(0, dtype=numpy.int64)
    count = blocks * math.prod(shape)
    deviations = (changed - count / 2) / math.sqrt(count / 4)
    deviations[len(flips) :] /= math.sqrt(2)  # each pair occurs twice
    return Result("avalanche", count, deviations.flatten(), "share of changes", 0.5 / math.sqrt(count))
