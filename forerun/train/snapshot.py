"""Atomic checkpoints: written to another folder, then renamed. safetensors only."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ModelError
from forerun.train.ema import WeightEma
from forerun.train.progress import Progress


def save_snapshot(
    folder: Path,
    head: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None,
    progress: Progress,
    ema: WeightEma | None = None,
) -> None:
    """Write a head, optimiser moments and averages (if given) and progress as a folder, replacing
    the previous one; at every instant one complete checkpoint exists. Raises OSError if it cannot
    be written; the previous one is then intact.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    tensors = {f"head.{n}": p.detach().cpu() for n, p in head.named_parameters()}
    if optimiser is not None:
        named = _by_name(head)
        for parameter, moments in optimiser.state.items():
            for key, value in moments.items():
                tensors[f"optimiser.{named[id(parameter)]}.{key}"] = value.detach().cpu()
    if ema is not None:
        tensors |= {f"average.{name}": value.cpu() for name, value in ema.weights.items()}
    facts = {name: getattr(progress, name) for name in progress.__slots__}
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, fresh / "state.safetensors")
        (fresh / "progress.json").write_text(json.dumps(facts))
        _replace(fresh, folder)
    except Exception as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OSError(str(error)) from error


def _replace(fresh: Path, folder: Path) -> None:
    """Replace `folder` by `fresh`; at every instant one complete checkpoint exists."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    fresh.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_snapshot(
    folder: Path,
    head: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None,
    progress: Progress,
    ema: WeightEma | None = None,
) -> bool:
    """Restore in place what `save_snapshot` wrote. Returns False, and changes nothing, if there is
    no checkpoint. Averages that it does not contain begin with the loaded weights. Raises
    ModelError if the checkpoint is of another head.
    """
    if not folder.exists():
        folder = folder.with_name(folder.name + ".old")
    if not (folder / "progress.json").exists():
        return False
    tensors = load_file(folder / "state.safetensors")
    own = dict(head.named_parameters())
    saved = {n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")}
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in own.items()}:
        raise ModelError(f"{folder} holds another head; choose another --out or remove it")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    if optimiser is not None:
        for name, parameter in own.items():
            prefix = f"optimiser.{name}."
            moments = {
                n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)
            }
            if moments:
                device = parameter.device
                optimiser.state[parameter] = {
                    k: v if k == "step" else v.to(device) for k, v in moments.items()
                }
    if ema is not None:
        for name, weights in ema.weights.items():
            weights.copy_(tensors.get(f"average.{name}", saved[name]))
    for name, value in json.loads((folder / "progress.json").read_text()).items():
        setattr(progress, name, value)
    return True


def _by_name(head: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in head.named_parameters()}
