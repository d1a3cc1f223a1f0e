# ---
# jupyter:
#   jupytext:
#     cell_markers: '"""'
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
"""
# Distributed training, from one process to a mesh

You know how to train a model on one GPU. This tutorial shows what happens when several processes train it together: which
process holds which tensors, what they send to each other and when, and what that costs. Every kind of parallelism is run on
a small model and compared with a plain loop on one process, and two of the pictures are drawn from what was measured.

It needs no GPU: the ranks are processes on this machine that communicate with gloo. Each section says what changes on GPUs.
It runs in about half a minute on two cores,

- as a notebook: `examples/tutorial/distributed_training.ipynb`;
- as a script that starts ranks for each section: `python examples/tutorial/distributed_training.py`;
- as a script in which the same ranks run all sections: `python examples/tutorial/distributed_training.py --distributed`.

With `--distributed` any launcher can start the ranks, on one machine or on several, each with its own `--node-rank`:

```text
torchrun --nproc-per-node 2 distributed_training.py --distributed
torchrun --nproc-per-node 2 --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 distributed_training.py --distributed
```
"""

# %%
import argparse
import os
import sys
import time
from pathlib import Path

# CPU ranks, also on a machine with GPUs. Without this line, each rank takes a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from drawing import memory, timeline  # beside this file: SVG, without any dependency
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Trainer, dist

# %% [markdown]
"""
## Why distribute

There are two reasons, and they lead to different answers.

**Time.** One device computes too slowly. Several devices each take a part of every batch: *data parallelism*. Everyone holds
the whole model, so what has to travel are gradients, once per step.

**Memory.** The model does not fit on one device. Training with AdamW in fp32 needs 16 bytes for each parameter before the
first activation is stored: 4 for the weight, 4 for its gradient and 8 for the two averages of the optimizer. A model of 7
billion parameters therefore needs 112 GB. Then the *model* is divided: by layers (split, pipeline), inside layers (tensor
parallel), or only in storage (fully sharded), and what travels are activations or weights.

What you gain is bounded by what you wait for. If a step computes for a time C and communicates for a time T, of which a share
h is hidden behind computation, N ranks with the same total batch take C / N + (1 − h) · T.

A few words, as they are used everywhere below. A *rank* is one process, usually with one GPU; the *world* is their number. A
*step* is one optimizer step. The *batch* is the number of samples of a step over all ranks. A *micro-batch* is what a rank
puts through the model at once.
"""

# %% [markdown]
"""
## Starting ranks

Ranks are processes. A launcher starts them and tells each one its number and where to meet the others, in environment
variables (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …). `torchrun` and `paceline launch` do that for a script. From a notebook,
`paceline.launch(fn, ranks=2)` runs a function on forked ranks and returns the result of rank 0. The helper below does one or
the other, so that this file works both ways.
"""

# %%
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--distributed", action="store_true", help="run all sections on the same ranks")
parser.add_argument("--figures", type=Path, help="write the measured pictures into this folder")
options, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own

if options.distributed and "RANK" not in os.environ:  # no launcher has started this process: start one
    command = [sys.executable, "-m", "paceline", "launch", "-n", "2", *sys.argv]
    os.execv(sys.executable, command)

LAUNCHED = int(os.environ.get("WORLD_SIZE", "1")) > 1


def run(fn, ranks=2, **kwargs):
    """`fn(**kwargs)` on the ranks that a launcher started, or on ranks of our own."""
    return fn(**kwargs) if LAUNCHED else paceline.launch(fn, ranks=ranks, **kwargs)


def say(*words):
    """Print on one rank. Every rank executes the same script, so a plain print would appear once per rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*words)


def show(name, picture):
    """Display a picture in a notebook; in a script, write it if --figures is given."""
    if "get_ipython" in globals():
        from IPython.display import SVG, display

        display(SVG(picture))
    elif options.figures and int(os.environ.get("RANK", "0")) == 0:
        options.figures.mkdir(parents=True, exist_ok=True)
        (options.figures / f"{name}.svg").write_text(picture)


# %%
def who():
    return dist.all_gather_object([dist.rank(), os.getpid()])


for rank, pid in run(who):
    say(f"rank {rank} is process {pid}")

# %% [markdown]
"""
## What ranks can say to each other

Ranks share no memory. They communicate by *collectives*: calls that every rank makes, in the same order, and that return when
the data has been exchanged. Four of them carry all of the methods below.

![Broadcast, all-reduce, all-gather and reduce-scatter, before and after](../../docs/tutorial/collectives.svg)

An all-reduce is a reduce-scatter followed by an all-gather. In a ring, each rank sends 2 (N − 1) / N times the size of the
tensor, which hardly grows with the number of ranks; the number of messages does, so many small tensors are slower than a
large one.
"""


# %%
def collectives():
    rank, world = dist.rank(), dist.world()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)  # everyone has the sum
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([10.0 * rank]))  # everyone has all parts
    own = torch.zeros(1)
    dist.reduce_scatter(own, [torch.tensor([float(part)]) for part in range(world)])  # rank r has the sum of parts r
    news = torch.tensor([42.0 if rank == 0 else 0.0])
    dist.broadcast(news)  # everyone has what rank 0 had
    own_parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(own_parts, own)
    return {
        "all_reduce": total.item(),
        "all_gather": torch.cat(parts).tolist(),
        "reduce_scatter, by rank": torch.cat(own_parts).tolist(),
        "broadcast": news.item(),
    }


for name, value in run(collectives).items():
    say(f"{name:<24} {value}")

# %% [markdown]
"""
A collective that one rank does not reach makes the others wait. That is the hang that everybody meets once: an `if rank == 0:`
around an evaluation, or one batch more on one rank. Under `paceline launch` such a wait is reported within seconds, with the
rank that is missing and the line at which it is.

**On GPUs** the same calls use NCCL over NVLink, PCIe or InfiniBand instead of gloo over TCP, and are queued on a stream, so the
CPU does not wait for them. MPI works where torch was built with it.
"""

# %% [markdown]
"""
## A model, and a loop to compare with

Four linear layers, 32 samples per step, and ten steps in the order of the data, so that every method sees the same samples.
"""

# %%
STEPS, BATCH = 10, 32
INPUTS = torch.randn(STEPS * BATCH, 32, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :4].argmax(1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def plain_loop():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for inputs, targets in zip(INPUTS.split(BATCH), TARGETS.split(BATCH), strict=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


EXPECTED = plain_loop()
say("plain loop:", " ".join(f"{loss:.4f}" for loss in EXPECTED))

# %% [markdown]
"""
## Data parallelism

Each rank has the whole model and takes its part of the batch. The loss of a batch is a mean over samples, so its gradient is
the mean of the gradients of the parts, if the parts are equally large. Done by hand, that is four lines: take a part, run
backward, all-reduce the gradients, step.
"""


# %%
def by_hand():
    model, rank, world = build(), dist.rank(), dist.world()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for inputs, targets in zip(INPUTS.split(BATCH), TARGETS.split(BATCH), strict=True):
        own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op="mean")
        optimizer.step()  # equal gradients and equal weights: the models stay equal
        mean = loss.detach()
        dist.all_reduce(mean, op="mean")  # for the log: the loss of a rank is that of its samples only
        losses.append(mean.item())
    return losses


def compare(name, losses):
    off = max(abs(a - b) for a, b in zip(losses, EXPECTED, strict=True))
    say(f"{name:<28} last loss {losses[-1]:.6f}, at most {off:.1e} off")


compare("by hand", run(by_hand))

# %% [markdown]
"""
This loop has everything that matters and three weaknesses. It communicates only after the whole backward pass. It sends many
small messages. And it is wrong as soon as ranks have different numbers of samples, or of tokens that count: a mean of means is
not the mean. The first two are what DistributedDataParallel solves; the third is why a Trainer here adds up Σ loss and Σ weight
over all ranks before it divides.
"""

# %% [markdown]
"""
### DataParallel: one process, several GPUs

![DataParallel: GPU 0 sends weights and samples, and collects outputs and gradients](../../docs/tutorial/dp.svg)

`nn.DataParallel` (here `strategy="dp"`) needs no launcher: one process copies the model to every GPU *in every step*, sends
each its samples, runs one thread per GPU, and collects outputs and gradients on GPU 0. All threads share one Python interpreter
and its lock, GPU 0 holds more than the others, and it ends at one machine. Use it to try several GPUs without changing how a
script is started; for anything else, DDP is faster. On a CPU there is only one device, so the run below has one replica.
"""


# %%
def train(settings):
    """Ten steps with the Trainer. `settings` decide who holds what; the model and the loop do not change."""
    trainer = Trainer(
        build(),
        {"name": "adamw", "lr": 1e-2},
        criterion=nn.CrossEntropyLoss(),
        batch=BATCH,
        shuffle=False,
        run=False,
        quiet=True,
        **settings,
    )
    return trainer.train(TensorDataset(INPUTS, TARGETS), epochs=1).losses


if not LAUNCHED:  # one process: not for a world of several
    compare("dp", run(train, ranks=1, settings={"strategy": "dp"}))

# %% [markdown]
"""
### DistributedDataParallel

![DDP: both ranks hold all layers; gradients of each layer are all-reduced during backward](../../docs/tutorial/ddp.svg)

| each rank holds | each rank reads | ranks send |
|---|---|---|
| the whole model, all gradients, all optimizer state | its part of the batch | gradients, once per step: an all-reduce of 4 bytes per parameter |

DDP groups gradients into *buckets* of 25 MB and starts the all-reduce of a bucket when its last gradient is ready. Backward runs
from the last layer to the first, so the gradients of the last layers travel while those of the first ones are still computed.
Only the last bucket has nothing to hide behind. With gradient accumulation, all but the last micro-batch of a step skip the
exchange (`no_sync`).
"""

# %%
compare("ddp", run(train, settings={"strategy": "ddp"}))
compare("ddp, 4 micro-batches", run(train, settings={"strategy": "ddp", "accumulate": 4}))
if not LAUNCHED:
    compare("ddp on 3 ranks", run(train, ranks=3, settings={"strategy": "ddp"}))  # 32 = 11 + 10 + 11

# %% [markdown]
"""
`batch` is the number of samples over **all** ranks, so the result does not change with their number, not even where they do not
divide the batch. Most scripts set the batch *per GPU* instead; then more GPUs mean larger steps, and the learning rate has to
follow (linearly, or with the square root, after a warm-up: `optimizer.lr_rule`).

**On GPUs**: one rank per GPU, NCCL, and `precision="bf16"`. Gradients are still fp32, 4 bytes per parameter.
"""

# %% [markdown]
"""
## Dividing the model by layers

### Split

![Split: layers 1 and 2 on GPU 0, layers 3 and 4 on GPU 1](../../docs/tutorial/split.svg)

The simplest way to train a model that is too large for one GPU: put some of its layers on another one, and move the activations
where the layers are. One process, no launcher. The price is in the picture: a layer needs the output of the one before, so at
any time one device works and the others wait.
"""

# %%
if not LAUNCHED:
    compare("split", run(train, ranks=1, settings={"strategy": "split", "split": {"devices": ["cpu", "cpu"]}}))

# %% [markdown]
"""
### Pipeline

![Pipeline: stage 0 sends activations of a micro-batch, stage 1 returns their gradients](../../docs/tutorial/pipeline.svg)

| each rank holds | each rank reads | ranks send |
|---|---|---|
| the layers of its stage, their gradients and optimizer state | the same samples (the first stage uses inputs, the last one targets) | activations of each micro-batch to the next stage, and their gradients back |

The batch is cut into micro-batches that follow each other through the stages, so that all of them have something to do, except
at the beginning and at the end: the *bubble*. With p stages and m micro-batches, a share of (p − 1) / (m + p − 1) of the
time is idle. More micro-batches make it smaller. What differs between schedules is memory: *gpipe* runs all forwards first, so a stage
keeps the activations of all m micro-batches; *1f1b* alternates as soon as it can, and keeps those of at most p.

Let us look at it. The layers below do not compute: they sleep, 20 ms in a forward and 40 ms in a backward, and write down when.
So the picture shows the schedule, and not how busy this machine is.
"""

# %%
EVENTS = []


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, seconds):
        ctx.seconds, began = seconds, time.perf_counter()
        time.sleep(seconds)
        EVENTS.append(["F", began, time.perf_counter()])
        return inputs + weight

    @staticmethod
    def backward(ctx, gradient):
        began = time.perf_counter()
        time.sleep(2 * ctx.seconds)
        EVENTS.append(["B", began, time.perf_counter()])
        return gradient, gradient.sum(0), None


class Stage(nn.Module):
    def __init__(self, seconds=0.02):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(4)), seconds

    def forward(self, inputs):
        return Work.apply(inputs, self.weight, self.seconds)


def measure(schedule, microbatches):
    """What each rank did in one step: (kind, micro-batch, start, end)."""
    trainer = Trainer(
        nn.Sequential(*(Stage() for _ in range(dist.world()))),
        {"name": "sgd", "lr": 0.1},
        criterion=nn.MSELoss(),
        strategy="pp",
        pipeline={"schedule": schedule, "microbatches": microbatches},
        batch=microbatches,
        run=False,
        quiet=True,
    )
    samples = torch.zeros(2 * microbatches, 4)
    for batch in trainer.loader(TensorDataset(samples, samples + 1)):
        dist.barrier()  # all ranks begin together; their clocks are compared with this moment
        EVENTS.clear()
        began = time.perf_counter()
        trainer.training_step(batch)  # the first of two steps includes the checks before training
    numbers = {"F": 0, "B": 0}
    own = []
    for kind, start, end in EVENTS:
        numbers[kind] += 1
        own.append([kind, numbers[kind], start - began, end - began])
    return dist.all_gather_object(own)


def idle(found):
    last = max(event[3] for rank in found for event in rank)
    return 1 - sum(event[3] - event[2] for rank in found for event in rank) / (last * len(found))


measured = {
    f"{schedule}, {count} micro-batches": run(measure, ranks=4, schedule=schedule, microbatches=count)
    for schedule, count in (("gpipe", 4), ("gpipe", 8), ("1f1b", 8))
}
for name, found in measured.items():
    stages, count = len(found), sum(event[0] == "F" for event in found[0])
    say(f"{name:<24} {idle(found):.0%} idle; (p-1)/(m+p-1) = {(stages - 1) / (count + stages - 1):.0%}")
show("bubble", timeline("One step of a pipeline, as measured", measured))

# %% [markdown]
"""
White is the bubble. The idle share is a little above the formula, because handing a micro-batch on takes time too: the small gaps
between its bars. Both schedules of 8 micro-batches take equally long, but look at rank 0: before its first backward, *gpipe*
holds the activations of 8 micro-batches, *1f1b* those of 4.

The same model as before, in a pipeline of two stages:
"""

# %%
if LAUNCHED and dist.world() > 4:
    say("pp: the model has four layers with weights, too few for so many stages")
else:
    compare("pp, 1f1b", run(train, settings={"strategy": "pp", "pipeline": {"schedule": "1f1b", "microbatches": 4}}))

# %% [markdown]
"""
**On GPUs**, sends overlap with computation, so what remains is the bubble. `interleaved` gives each rank several smaller stages
and divides the bubble by their number, and `zero-bubble` fills it with the gradients of weights, which nobody waits for. Only
activations at the boundaries travel, so a pipeline is the kind of parallelism that tolerates a slow network between machines.
"""

# %% [markdown]
"""
## Fully sharded data parallelism

![FSDP: each rank holds half of each layer, gathers a layer before it runs and scatters its gradients](../../docs/tutorial/fsdp.svg)

| each rank holds | each rank reads | ranks send |
|---|---|---|
| 1/N of every parameter, gradient and optimizer state | its part of the batch | the weights of each layer, gathered before its forward and again before its backward, and its gradients, reduce-scattered: 1.5 times what DDP sends |

DDP keeps N equal copies of everything. FSDP keeps one, in N pieces, and computes as DDP does: before a layer runs, its
weights are gathered from all ranks, and right afterwards they are freed. The next layer is gathered while this one computes. So
at any time a rank holds its pieces, and one or two whole layers. The optimizer only updates the pieces.

How much a rank holds is not a matter of opinion. After a step, we count the bytes of the tensors that it has.
"""


# %%
class Gradients:
    def on_gradients(self, record):  # reduced gradients: under FSDP those of this rank's shards
        self.bytes = sum(gradient.nbytes for gradient in record.gradients.values())


def held(settings):
    """The bytes that each rank holds between two steps."""
    gradients = Gradients()
    trainer = Trainer(
        build(),
        {"name": "adamw", "lr": 1e-2},
        criterion=nn.CrossEntropyLoss(),
        callbacks=[gradients],
        batch=BATCH,
        run=False,
        quiet=True,
        **settings,
    )
    trainer.train(TensorDataset(INPUTS, TARGETS), max_steps=2)
    parameters = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in trainer.model.parameters()]
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    own = {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": gradients.bytes,
        "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
    }
    return dist.all_gather_object(own)


sizes = {}
for ranks, strategy in ((2, "ddp"), (2, "fsdp"), (4, "fsdp")):
    found = run(held, ranks=ranks, settings={"strategy": strategy})
    sizes[f"{strategy}, {len(found)} ranks"] = found
for name, found in sizes.items():
    say(f"{name:<14} bytes by rank: {[sum(own.values()) for own in found]}")
show("memory", memory("What each rank holds between two steps", sizes))
compare("fsdp", run(train, settings={"strategy": "fsdp"}))

# %% [markdown]
"""
On top of this come activations, which sharding does not change (`recompute: full` trades them for a second forward), and the
layers that are gathered at the moment. The unit that is gathered is a *block*: one transformer layer, not one matrix. If blocks
are too large, the peak is high; if they are too small, there are many small messages.

**On GPUs**, `torch.cuda.max_memory_allocated()` shows the peak, and the log of a run has it. `precision="bf16"` gathers weights
in bf16, which halves what travels. With several machines, `strategy="hsdp"` shards inside a machine, where NVLink is fast, and
replicates between machines, where only gradients travel. `fsdp: {reshard: false}` keeps layers gathered between forward and
backward, which saves a third of the traffic for more memory, and `fsdp: {offload: true}` keeps the pieces in the memory of the
CPU.
"""

# %% [markdown]
"""
## Tensor parallelism

![Tensor parallel: each rank holds half of each matrix; partial sums are all-reduced after each pair](../../docs/tutorial/tensor.svg)

| each rank holds | each rank reads | ranks send |
|---|---|---|
| a part of every large matrix, and its gradients and optimizer state | the same samples | activations: an all-reduce for each pair of matrices, in forward and in backward |

A matrix product can be cut in two ways. Cut by *columns*, each rank computes some of the outputs: no communication, but each
rank then has a part of the activations only. Cut by *rows*, each rank needs just that part, and computes a partial sum of all
outputs; an all-reduce adds them up. So a column cut is followed by a row cut, with any elementwise function between them: one
exchange for two layers. In a transformer these pairs are query-key-value and output projection (each rank has some of the
heads), and the two layers of the MLP.
"""


# %%
PLAN = {"tensor": {"plan": {"0": "column", "2": "row", "4": "column", "6": "row"}}}


def shapes():
    trainer = Trainer(build(), criterion=nn.CrossEntropyLoss(), strategy="tp", run=False, quiet=True, **PLAN)
    return {name: list(p.to_local().shape) for name, p in trainer.model.named_parameters() if name.endswith("weight")}


whole = {name: list(p.shape) for name, p in build().named_parameters()}
for name, shape in run(shapes).items():
    say(f"{name}: {whole[name]} in all, {shape} on rank 0")
compare("tp", run(train, settings={"strategy": "tp", **PLAN}))

# %% [markdown]
"""
The exchange is in the middle of the computation, and nothing hides it. **On GPUs**, tensor parallelism therefore stays within a
machine with NVLink: 2, 4 or 8 ranks. It is the one that makes a single layer smaller, and that lets many GPUs work on a small
batch. Models of Hugging Face with a `tp_plan`, and `gpt` here, declare their cuts; `sequence` also cuts norms and dropout along
the tokens.
"""

# %% [markdown]
"""
## Combining

![Combined: shard 2 × tensor 2 on four ranks](../../docs/tutorial/combined.svg)

The methods divide different things, so they multiply. Ranks form a *mesh*, a grid with an axis for each method, and each of
them communicates along its own axis only. Put the axis that talks most on the fastest links: tensor inside a machine, then
shard, then replicate, then pipeline between machines. `layout={"shard": 2, "tensor": 2}` below is FSDP between two groups of
two tensor-parallel ranks: a rank holds a quarter of every matrix, and reads half of every batch.
"""

# %%
if LAUNCHED and dist.world() % 2:
    say("tensor: 2 needs an even number of ranks")
else:
    compare("shard × tensor", run(train, ranks=4, settings={"layout": {"shard": "auto", "tensor": 2}, **PLAN}))

# %% [markdown]
"""
## Choosing

| situation | take | because |
|---|---|---|
| it fits on one GPU, and you want results sooner | `ddp` | least communication, and all of it can be hidden |
| parameters, gradients and optimizer state do not fit | `fsdp` | 1/N of them on each rank, for 1.5 times the communication |
| the same, on several machines | `hsdp` | gathers inside a machine |
| activations do not fit | `recompute`, a smaller `micro_batch` with `accumulate` | dividing the model does not help first |
| a single layer does not fit, or the batch is too small for more ranks | `tp` inside a machine, with `fsdp` outside | divides the layers themselves |
| hundreds of GPUs, or a slow network between machines | `pp` between machines | only activations at the boundaries travel |
| the network is the bottleneck of `ddp` | a larger batch, `sync: bf16`, PowerSGD, DiLoCo | fewer bytes |
| one process and no launcher, and the model does not fit | `split` | simplest; devices take turns |

`strategy="auto"`, the default, does the arithmetic for the first rows and says why:
"""


# %%
def automatic():
    trainer = Trainer(build(), criterion=nn.CrossEntropyLoss(), batch=BATCH, run=False)
    trainer.train(TensorDataset(INPUTS, TARGETS), max_steps=1)


run(automatic)

# %% [markdown]
"""
Every line above ended with the loss of the plain loop, up to the rounding of sums in another order. That is worth keeping: a
distributed run that does something else than the one on your laptop is a bug, whatever its speed. `paceline parity recipe.yaml`
compares any recipe with one process, layout by layout, and `paceline bench scaling recipe.yaml` measures what a layout gains.

Next: [layouts](../../docs/guides/layouts.md), [launching on several machines](../../docs/guides/launch.md),
[what scaling to expect](../../docs/guides/expectations.md), and
[less communication](../../docs/guides/communication.md).
"""
