"""Recipes made by somebody who means harm: each is accepted or refused with a code, soon and in little memory.

    for answer in read_all(range(150)):
        assert answer.problem == ""

Recipes are read in forked processes, which end when one takes too long.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import paceline
from paceline.config.recipe import Config, effective
from paceline.errors import PacelineError

SECONDS, MEGABYTES = 2.0, 200
WALL_SECONDS = 40  # for a recipe that blocks; on a busy machine, computing takes longer than its own seconds
LONGEST_MESSAGE = 20_000
_SOURCE = Path(paceline.__file__).parents[2]
BASES = [path.read_bytes() for path in (*sorted((_SOURCE / "recipes").glob("*.yaml")),)] or [b"batch: 8\n"]
TOML = b'batch = 8\nseed = 1\n[optimizer]\nlr = 1e-3\n[model]\nname = "mlp"\nwidth = 16\nsizes = [1, 2, 3]\n'
TOKENS = [
    "model", "name", "gpt", "batch", "seed", "train", "epochs", ":", ": ", "\n", "\n  ", "- ", "? ", "[", "]", "{", "}",
    ",", "&a ", "*a", "<<: ", "!!set ", "!!binary ", "!!python/object:os.system ", "!x ", "|\n", ">\n", "'", '"', "\\",
    "#", "%YAML 1.1\n", "---\n", "...\n", "\t", "\0", "\x85", "\u2028", "\ufeff", "\x1b[2J", "~", "null", "true", "1",
    "-1", "1e999", ".inf", ".nan", "0x", "2024-01-01", "1:30", "=", "é", "漢",
]  # fmt: skip
VALUES = [
    "99999999999999999999999", "-1", "0", "1e999", "-.inf", ".nan", "0xffffffffffffffffffff", "1:2:3:4:5:6:7:8:9:10",
    "0b1" + "0" * 300, "2024-01-01", "2024-13-45", "2024-01-01T00:00:00Z", "!!binary aGk=", "!!binary x",
    "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/object/apply:os.system [ls]", "!!int x", "!!float x",
    "!!timestamp x", "!!str", "!!map 1", "!<tag:yaml.org,2002:bool> 1", "[]", "{}", "[[[[]]]]", "{a: {b: {c: 1}}}",
    "'\\ud800'", '"\\ud800"', '"\\0"', "{? [a] : b}", "{? {a: b} : c}", "{1: a}", "{null: a}", "*nowhere", "&a [*a]",
    "&a {b: *a}", "&a {*a : 1}", "{<<: 1}", "{<<: [1]}", "{<<: {name: gpt}}", "yes", "NO", "''", "-", "?", "|",
]  # fmt: skip
KEYS = [
    "model",
    "model.name",
    "model.x",
    "batch",
    "seed",
    "train.epochs",
    "optimizer.lr",
    "env",
    "env.A",
    "run",
    "loggers",
    "nothing",
    "é",
]


@dataclass(frozen=True)
class Answer:
    seed: int
    kind: str
    code: str = ""
    problem: str = ""
    seconds: float = 0.0  # of CPU time
    megabytes: int = 0  # of memory, more than before the first recipe of its process


@dataclass(frozen=True)
class Recipe:
    path: Path
    overrides: list[str]


def _mutated(chance: random.Random) -> tuple[str, bytes]:
    suffix, text = (".toml", bytearray(TOML)) if chance.random() < 0.3 else (".yaml", bytearray(chance.choice(BASES)))
    for _ in range(chance.choice([1, 1, 2, 5, 50])):
        at, much = chance.randrange(len(text) + 1), chance.randint(1, 20)
        new = chance.choice([chance.randbytes(1), chance.choice(TOKENS).encode(), chance.choice(VALUES).encode(), b""])
        if chance.random() < 0.2:
            new = bytes(text[at : at + much]) * chance.randint(1, 30)
        text[at : at + (much if chance.random() < 0.5 else 0)] = new
    return suffix, bytes(text)


def _noise(chance: random.Random) -> tuple[str, bytes]:
    if chance.random() < 0.4:
        return chance.choice([".yaml", ".toml"]), chance.randbytes(chance.choice([0, 1, 10, 1000, 60_000]))
    return ".yaml", "".join(chance.choices(TOKENS, k=chance.choice([3, 30, 300, 3000]))).encode("utf-8")


def _encoded(chance: random.Random) -> tuple[str, bytes]:
    text = chance.choice(BASES).decode()
    encoding = chance.choice(["utf-16", "utf-32", "utf-16-le", "utf-7", "cp500", "utf-8-sig"])
    return chance.choice([".yaml", ".toml"]), text.encode(encoding, errors="replace")


def _nested(chance: random.Random) -> tuple[str, bytes]:
    depth = chance.choice([20, 40, 300, 900, 5_000, 60_000])
    opening, closing, suffix = chance.choice(
        [
            ("[", "]", ".yaml"), ("{a: ", "}", ".yaml"), ("- ", "", ".yaml"), ("? ", "", ".yaml"),
            ("[{a: ", "}]", ".yaml"), ("[", "]", ".toml"), ("{a=", "}", ".toml"), ("a.", "a=1", ".toml"),
            ("[[", "]]", ".toml"), ("'''", "", ".toml"),
        ]
    )  # fmt: skip
    start = "model:\n  name: gpt\n  x: " if suffix == ".yaml" else "x = " if opening != "a." else ""
    inner = "1" if opening == "{a=" else ""
    return suffix, (start + opening * depth + inner + closing * depth).encode()


def _aliases(chance: random.Random) -> tuple[str, bytes]:
    width, levels, key = (
        chance.choice([2, 9, 30]),
        chance.choice([3, 9, 40, 200]),
        chance.choice(["list", "map", "merge", "key"]),
    )
    lines = ["model:", "  name: gpt", "  a0: &a0 " + ("[x, y]" if key == "list" else "{x: 1, y: 2}")]
    for level in range(1, levels):
        many = [f"*a{level - 1}"] * width
        if key == "map":
            text = "{" + ", ".join(f"k{n}: {each}" for n, each in enumerate(many)) + "}"
        elif key == "merge":
            text = "{<<: [" + ", ".join(many) + f"], z{level}: 1" + "}"
        else:
            text = "[" + ", ".join(many) + "]" if key == "list" else f"{{? [{', '.join(many)}] : 1}}"
        lines.append(f"  a{level}: &a{level} {text}")
    if chance.random() < 0.3:
        lines += ["  me: &me", "    again: *me", "    list: &l [*l, *me]"]
    return ".yaml", "\n".join(lines).encode()


def _huge(chance: random.Random) -> tuple[str, bytes]:
    count = chance.choice([300, 5_000, 30_000, 120_000, 1_000_000])
    digits = "".join(chance.choices("123456789", k=min(count, 120_000)))
    kinds: list[tuple[str, str]] = [
        (".yaml", f"seed: {digits}"), (".yaml", f"seed: 0x{digits}"), (".yaml", f"seed: 0b{'1' * count}"),
        (".yaml", f"seed: 0{'7' * count}"), (".yaml", "seed: 1" + ":59" * (count // 3)),
        (".yaml", f"clip_norm: {digits}.5e{digits[:9]}"), (".yaml", f"{'k' * count}: 1"),
        (".yaml", f"run: {'x' * count}"), (".yaml", f"run: '{'é' * (count // 2)}'"), (".yaml", "? " + "a" * count),
        (".yaml", "#" * count), (".yaml", "".join(f"k{n}: {n}\n" for n in range(count // 10))),
        (".yaml", "loggers: [" + "csv, " * (count // 5) + "csv]"),
        (".yaml", "model: {name: gpt, x: [" + "1," * (count // 2) + "1]}"), (".yaml", "\n" * count),
        (".yaml", " " * count), (".yaml", "a: &" + "a" * count), (".yaml", "a: !" + "a" * count),
        (".yaml", 'run: "' + "\\u00e9" * (count // 6) + '"'), (".yaml", "- \n" * (count // 3)),
        (".toml", f"seed = {digits}"), (".toml", f"seed = 0x{'f' * count}"), (".toml", f"clip_norm = 1e{digits[:9]}"),
        (".toml", f'run = "{"x" * count}"'), (".toml", "".join(f"k{n} = {n}\n" for n in range(count // 10))),
        (".toml", "x = [" + "1," * (count // 2) + "]"), (".toml", "[a]\n" * (count // 4)),
        (".toml", "".join(f"[a{n}.b.c]\n" for n in range(count // 10))),
        (".toml", "batch = 1_" + "0_" * (count // 2) + "0"),
    ]  # fmt: skip
    suffix, text = chance.choice(kinds)
    return suffix, text.encode()


def _values(chance: random.Random) -> tuple[str, bytes]:
    lines = [
        f"{chance.choice(KEYS).replace('.', '_' if chance.random() < 0.2 else '.')}: {chance.choice(VALUES)}"
        for _ in range(chance.randint(1, 4))
    ]
    extra = ["model:", "  name: gpt"] + [
        f"  {chance.choice('abc')}: {chance.choice(VALUES)}" for _ in range(chance.randint(0, 3))
    ]
    return ".yaml", "\n".join(lines + (extra if chance.random() < 0.5 else [])).encode()


def _toml_values(chance: random.Random) -> tuple[str, bytes]:
    values = [
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "inf",
        "nan",
        "-nan",
        "1e999",
        "''",
        '"\\u0000"',
        '"\\uD800"',
        "[]",
        "{}",
        "true",
        "0o7",
        "x",
    ]
    lines = [f"{chance.choice(KEYS)} = {chance.choice(values)}" for _ in range(chance.randint(1, 3))]
    return ".toml", "\n".join(lines).encode()


def _special(chance: random.Random, folder: Path) -> Path:
    """Something else than a file with a recipe."""
    path = folder / f"recipe{chance.choice(['.yaml', '.toml'])}"
    kind = chance.choice(
        ["folder", "pipe", "socket", "loop", "dangling", "sparse", "device", "missing", "long", "below a file"]
    )
    if kind == "folder":
        path.mkdir()
    elif kind in ("pipe", "socket"):
        os.mknod(path, (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK) | 0o600)
    elif kind in ("loop", "dangling"):
        path.symlink_to(path if kind == "loop" else folder / "nothing")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "device":
        return Path(chance.choice(["/dev/zero", "/dev/null", "/dev/tty", "/dev/full"]))
    elif kind == "long":
        return folder / ("x" * 5000)
    elif kind == "below a file":
        (folder / "file").touch()
        return folder / "file" / "recipe.yaml"
    return path


def _override(chance: random.Random) -> str:
    key = chance.choice([*KEYS, "a." * 5000 + "a", ".".join("abcdefgh" * 10), "", "..", "x" * 5000, "\udc80"])
    value = chance.choice(
        [
            *VALUES,
            "[" * 900 + "]" * 900,
            "\0",
            "\udc80",
            "x" * 100_000,
            _aliases(chance)[1].decode().replace("model:", ""),
        ]
    )
    return f"{key}{chance.choice(['=', '=', '=', ''])}{value}"


WRITERS: dict[str, Callable[[random.Random], tuple[str, bytes]]] = {
    "mutated": _mutated, "noise": _noise, "encoding": _encoded, "nesting": _nested, "aliases": _aliases, "huge": _huge,
    "values": _values, "TOML values": _toml_values,
}  # fmt: skip


def make(seed: int, folder: Path) -> tuple[str, Recipe]:
    chance = random.Random(seed)
    kind = chance.choice([*WRITERS, "mutated", "values", "special file", "override"])
    if kind == "special file":
        return kind, Recipe(_special(chance, folder), [])
    overrides = [_override(chance) for _ in range(chance.randint(1, 2))] if kind == "override" else []
    suffix, text = WRITERS.get(kind, lambda _: (".yaml", b"batch: 8\nmodel: {name: gpt}\n"))(chance)
    path = folder / f"recipe{suffix}"
    path.write_bytes(text)
    return kind, Recipe(path, overrides)


def read_all(seeds: Iterable[int]) -> Iterator[Answer]:
    """The answer for each seed. A process reads recipes until one of them ends it."""
    waiting = list(seeds)
    while waiting:
        answers, status = _read_in_process(waiting)
        yield from answers
        waiting = waiting[len(answers) :]
        if waiting:
            lost = waiting.pop(0)
            yield Answer(
                lost,
                "lost",
                problem=f"ended its process with {status}, after {SECONDS} s of CPU time or {WALL_SECONDS} s",
            )


def _read_in_process(seeds: list[int]) -> tuple[list[Answer], int]:
    with tempfile.TemporaryDirectory(prefix="paceline-recipes-") as name:
        told = Path(name) / "answers"
        child = os.fork()
        if child == 0:
            try:
                _be_reader(seeds, Path(name), told)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lines = told.read_text().splitlines() if told.exists() else []
        return [Answer(**json.loads(line)) for line in lines], status


def _be_reader(seeds: list[int], scratch: Path, told: Path) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with told.open("w", buffering=1) as file:
        for seed in seeds:
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                kind, recipe = make(seed, Path(name))
                signal.alarm(WALL_SECONDS)
                signal.setitimer(signal.ITIMER_PROF, 5 * SECONDS)
                resource.setrlimit(resource.RLIMIT_AS, (used + (2 * MEGABYTES << 20), resource.RLIM_INFINITY))
                began = time.process_time()
                code, problem = _read(recipe)
                seconds = time.process_time() - began
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            if seconds > SECONDS:
                problem = problem or f"took {seconds:.1f} s"
            if megabytes > MEGABYTES:
                problem = problem or f"took {megabytes} MB"
            file.write(json.dumps(asdict(Answer(seed, kind, code, problem, seconds, megabytes))) + "\n")
    os._exit(0)


def _read(recipe: Recipe) -> tuple[str, str]:
    """The code, and what is wrong with the answer."""
    try:
        config = Config.from_file(recipe.path, recipe.overrides)
        effective(config).encode()
        json.dumps(config.to_dict())
    except PacelineError as error:
        text = str(error).encode().decode()
        long = f"a message of {len(text)} characters" if len(text) > LONGEST_MESSAGE else ""
        return error.code, long
    except BaseException as error:
        return "", f"{type(error).__name__}: {str(error)[:200]}"
    return "", ""
