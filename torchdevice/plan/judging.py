"""Compares a plan with its limits: a baseline's figures, and a GPU's memory."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchdevice.kernel.python import foreign_files
from torchdevice.kernel.python.byte_sizes import written
from torchdevice.plan import fitting, rendering
from torchdevice.simulation import model_lookup

_LARGEST = 1 << 20
"""The greatest size of a baseline in bytes."""


def checked_model(name: str) -> str:
    """Return the model of a GPU that a name means.

    Raises:
        ValueError: There is no such model.
    """
    model = model_lookup.known_name(name)
    if model not in model_lookup.MODELS:
        near = difflib.get_close_matches(model, model_lookup.MODELS, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"--fits {name!r} is not the name of a GPU.{meant} docs/gpus.md lists them."
        )
    return model


def write(path: str, plan: Mapping[str, Any]) -> None:
    """Write a baseline: what a plan needs, and the versions with which."""
    kept = {name: plan[name] for name in ("program", "needs", "versions")}
    Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read(path: str) -> dict[str, Any]:
    """Return a baseline.

    Raises:
        ValueError: The file is none.
    """
    try:
        found = json.loads(foreign_files.read(path, _LARGEST))
        return {"needs": int(found["needs"]), "versions": dict(found["versions"])}
    except OSError as error:
        raise ValueError(
            f"{path!r} cannot be read: {error.strerror}. Write it with --write-baseline."
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{path!r} is no baseline of a plan. Write it with --write-baseline."
        ) from None


def judged(
    plan: Mapping[str, Any], baseline: Mapping[str, Any] | None, grow: float, model: str | None
) -> Iterator[dict[str, Any]]:
    """Yield a sentence for each comparison, and whether the plan fails it.

    Args:
        plan: The data of a plan.
        baseline: The need of an earlier plan; None for no comparison.
        grow: By how many percent more may be needed.
        model: The model of a GPU that the plan is to fit; None for none.
    """
    if not rendering.uses_gpus(plan):
        yield {"said": "There is nothing to compare.", "failed": True}
        return
    if plan.get("not changed") and plan["finished"]:
        names = " and ".join(plan["not changed"])
        yield {"said": f"The plan is without {names}.", "failed": True}
    if baseline is not None:
        yield _against(plan, baseline, grow)
    if model is not None:
        gpu = next(each for each in plan["fits"] if each["model"] == model)
        has = f"the {written(gpu['memory'])} of {gpu['name']}"
        if gpu["fits"] == fitting.YES:
            yield {"said": f"It fits {has}, with {gpu['headroom']:g} % left.", "failed": False}
        else:
            yield {"said": _REFUSED[gpu["fits"]].format(has), "failed": True}


_REFUSED = {
    fitting.NO: "It does not fit {}.",
    fitting.UNKNOWN: "The plan does not show that it fits {}.",
    fitting.WITHOUT_FRAGMENTS: "It fits {} only without the fragments.",
}


def _against(plan: Mapping[str, Any], baseline: Mapping[str, Any], grow: float) -> dict[str, Any]:
    finished = plan["finished"]
    before, now = baseline["needs"], plan["needs" if finished else "at least"]
    percent = 100 * (now - before) / max(before, 1)
    both = f"The baseline needs {written(before)}, and this {'' if finished else 'at least '}"
    said = f"{both}{written(now)}: {percent:+.2f} %, of {grow:+g} % allowed."
    if not finished and percent <= grow:
        said = f"{both}{written(now)}. The plan does not show how much more it needs."
    changed = [
        f"{name} {baseline['versions'][name]} -> {version}"
        for name, version in plan["versions"].items()
        if baseline["versions"].get(name, version) != version
    ]
    if changed:
        said += f" Versions differ: {', '.join(changed)}."
    return {"said": said, "failed": percent > grow or not finished}
