"""Runs a function on two real processes that train together over gloo."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def launch(function: Callable[..., Any], *args: Any, world: int = WORLD) -> list[Any]:
    """Call ``function(rank, *args)`` in as many fresh processes, and give what each returned.

    ``function`` is one of a module's top level. An error on a rank is raised here with its
    traceback; a hang ends after two minutes.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_rank, (function, args, world, port, folder), nprocs=world, join=True)
        return [torch.load(Path(folder, str(r)), weights_only=False) for r in range(world)]


def _rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world: int,
    port: int,
    folder: str,
) -> None:
    # As torchrun sets them.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The nvfuser|Grad strides do not match bucket view")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        result = function(rank, *args)
    finally:
        dist.destroy_process_group()
    torch.save(result, Path(folder, str(rank)))
