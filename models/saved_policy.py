"""Saves policies together with what is needed to build them again.

A file holds tensors and plain data only, so loading one runs no code from it:

==================  ==============================================================
key                 content
==================  ==============================================================
``"environment"``   groups and spaces, as in datasets
``"make_policy"``   options of ``make_policy``
``"networks"``      the ``state_dict`` of each network; ``"policy"`` is one
==================  ==============================================================
"""

import copy
import io
import re
import zipfile
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import nn
from torch.serialization import get_crc32_options, set_crc32_options

from marl_collect.core.description import EnvDescription
from marl_collect.files.atomic import write_atomically
from marl_collect.files.description_json import (
    environment_from_json,
    environment_to_json,
)
from marl_collect.models.attention import ATTENTION
from marl_collect.models.policy import description_of, make_policy

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
}
"""Classes of activations by the names that files have for them."""
ENVIRONMENT = "environment"
CONFIG = "config.json"
"""A file in the folder of each run of ``marl-collect compare``."""
BEST = "checkpoints/best.pt"
"""The file in such a folder that has the best weights."""
_ARCHIVE: Final = b"PK\x03\x04"
"""The first bytes of a zip archive, by which ``torch.load`` tells it."""
_CHUNK: Final = 2**20


def save_policy(path: Path | str, policy: nn.Module, what: Any, **options: Any) -> None:
    """Save a policy of ``make_policy`` for ``load_policy`` and the command line.

    Args:
        path: of the file.
        policy: what ``make_policy(what, **options)`` returned; it may be compiled.
        what: an environment, a factory, or a description, as for ``make_policy``.
        **options: of ``make_policy``, without functions as ``network`` and ``head``,
            because a file holds no code.

    Raises:
        TypeError: if the policy is no module.
        ValueError: if the options do not build this policy, or cannot be saved, or if
            the policy is on the meta device.
    """
    description = description_of(what)
    state = policy_state(description, options)
    if not isinstance(policy, nn.Module):
        raise TypeError(
            "The policy to save must be a module that make_policy returned, but is "
            f"{policy!r:.100}."
        )
    policy = _uncompiled(policy)
    weights = policy.state_dict()
    empty = [name for name, tensor in weights.items() if tensor.is_meta]
    if empty:
        raise ValueError(
            f"The policy to save has no values for {empty[0]}, because it is on the "
            "meta device: save collector.policy, or what materialize(policy) returns."
        )
    # On meta, this costs no memory.
    built = make_policy(description, **options | {"device": "meta"})
    # The text has what the weights do not show, such as activations.
    if _shapes(weights) != _shapes(built.state_dict()) or _text(policy) != _text(built):
        raise ValueError(
            "make_policy with these options builds another policy than the one to "
            "save: pass the options with which it was built."
        )
    for name, tensor in built.state_dict().items():
        if weights[name].dtype != tensor.dtype:
            raise ValueError(
                f"make_policy builds {name} with {tensor.dtype}, but the policy to "
                f"save has {weights[name].dtype}, which load_policy would not restore: "
                f"convert the policy with .to({tensor.dtype}) first."
            )
    write_tensors(Path(path), state | {"networks": {"policy": weights}})


def _text(module: nn.Module) -> str:
    """Return the module as text, without the devices that older tensordicts print."""
    return re.sub(r"\bdevice=[^,\s]*,?", "", repr(module))


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return a module without the wrappers of ``torch.compile``, with its weights."""
    module = getattr(module, "_orig_mod", module)
    plain = copy.copy(module)
    plain._modules = {
        name: None if child is None else _uncompiled(child)
        for name, child in module._modules.items()
    }
    return plain


def policy_state(
    description: EnvDescription, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``load_policy`` needs, besides ``"networks"``.

    Args:
        description: of the environment.
        options: of ``make_policy``.

    Raises:
        ValueError: if an option cannot be saved.
    """
    plain = dict(options)
    plain.pop("device", None)
    for name in ("network", "head"):
        if plain.get(name) not in (None, ATTENTION):
            raise ValueError(
                f"A policy with {name}= cannot be saved, because a file holds no code. "
                "Save its state_dict with torch.save, and build the policy again."
            )
    kind = plain.get("activation_class")
    if kind is not None:
        names = {kind: name for name, kind in ACTIVATIONS.items()}
        if kind not in names:
            raise ValueError(
                f"activation_class must be one of {list(names)} to be saved, but is "
                f"{kind}."
            )
        plain["activation_class"] = names[kind]
    if "dtype" in (plain.get("conv") or {}):
        dtype = str(plain["conv"]["dtype"]).removeprefix("torch.")
        plain["conv"] = {**plain["conv"], "dtype": dtype}
    return {ENVIRONMENT: environment_to_json(description), "make_policy": plain}


def load_policy(path: Path | str, what: Any = None) -> nn.Module:
    """Build a saved policy again, with its weights, on the CPU.

    Args:
        path: a file of ``save_policy``, a checkpoint of ``marl-collect compare``
            (``best.pt`` or ``last.pt``), or the folder of a run, whose best weights
            are loaded. A folder that contains one run stands for that run.
        what: the environment that the policy shall act in (also a factory or a
            description), to check that it fits; None to skip the check. A policy whose
            agents share a network, and see neither each other nor identities, acts for
            the number of agents of this environment, which may be another one.

    Returns:
        A policy for collectors, ``evaluate``, ``play`` and training.

    Raises:
        ValueError: if the file is damaged or no saved policy, or if the policy does not
            fit the environment; names the file.
        FileNotFoundError: if there is no such file.
    """
    file = policy_file(Path(path))
    state = read_tensors(file)
    if not (isinstance(state, dict) and ENVIRONMENT in state):
        raise ValueError(
            f"{file} has no description of the policy, only {_kind(state)}. Write it "
            "with save_policy(path, policy, env, **options)."
        )
    target = None if what is None else description_of(what)
    try:
        description = environment_from_json(state[ENVIRONMENT])
        options = dict(state["make_policy"])
        weights = state["networks"]["policy"]
        if "activation_class" in options:
            options["activation_class"] = ACTIVATIONS[options["activation_class"]]
        if "dtype" in (options.get("conv") or {}):
            dtype = getattr(torch, options["conv"]["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{dtype!r} is no dtype")
            options["conv"] = {**options["conv"], "dtype": dtype}
        code = {name for name in ("network", "head") if name in options}
        if options.get("network") == ATTENTION:
            code.discard("network")
        if code:
            raise TypeError(f"{', '.join(sorted(code))} would be code")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged, or of another version "
            f"({type(error).__name__}: {error})."
        ) from error
    if target is not None:
        any_number = options.get("share_params", True) and not (
            options.get("centralised") or options.get("agent_ids")
        )
        _check_fits(file, description, target, any_number=any_number)
        description = target
    policy = make_policy(description, **options)
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return policy


def saved_options(path: Path | str) -> dict[str, Any] | None:
    """Return the options of ``make_policy`` that a policy was saved with.

    Args:
        path: of a file; None is returned for a file that ``load_policy`` cannot read.

    Raises:
        ValueError: if the file is damaged.
    """
    state = read_tensors(Path(path))
    if not (isinstance(state, dict) and ENVIRONMENT in state):
        return None
    return dict(state.get("make_policy", {}))


def load_networks(
    path: str, networks: Mapping[str, nn.Module], description: EnvDescription
) -> None:
    """Load the networks of a saved policy or run that ``networks`` has too.

    Args:
        path: as for ``load_policy``.
        networks: by name; ``"policy"`` is one.
        description: of the environment to train on.

    Raises:
        ValueError: if the file is damaged, if its policy was built for another
            environment or with other options, or if a network has other weights.
        FileNotFoundError: if there is no such file.
    """
    file = policy_file(Path(path))
    state = read_tensors(file)
    loaded = state.get("networks", {}) if isinstance(state, dict) else {}
    if "policy" not in loaded:
        raise ValueError(f"{file} has no policy, only {_kind(state)}.")
    if ENVIRONMENT in state:
        saved = repr(load_policy(file, description)).splitlines()
        # The text has what the weights do not show, such as activations.
        for before, now in zip_longest(
            saved, repr(networks["policy"]).splitlines(), fillvalue="nothing"
        ):
            if before != now:
                raise ValueError(
                    f"The policy in {file} does not fit the setup to train: it has "
                    f"{before.strip()}, but the setup has {now.strip()}."
                )
    for name in [name for name in networks if name in loaded]:  # The policy first.
        try:
            networks[name].load_state_dict(loaded[name])
        except (RuntimeError, KeyError) as error:  # KeyError: parameters of a loss.
            raise ValueError(
                f"The {name} in {file} does not fit the setup to train: {error}"
            ) from error


def write_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain data to a file, completely or not at all.

    Raises:
        TypeError: if ``read_tensors`` could not read it; names the first such value.
    """
    checksums = get_crc32_options()
    set_crc32_options(True)  # read_tensors needs them; the user may do without.
    try:
        buffer = _saved(dict(state))
    finally:
        set_crc32_options(checksums)
    if not _is_readable(buffer):
        where, value = _unreadable(state, ())
        raise TypeError(
            f"{path} was not written: {' / '.join(where)} is of type "
            f"{type(value).__module__}.{type(value).__name__}, which could not be read "
            "again. Expected tensors, numbers, strings, and lists and dicts of these: "
            "float(x) of a NumPy number, torch.from_numpy(x) of an array."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _is_readable(buffer: io.BytesIO) -> bool:
    """Return whether ``torch.load`` reads it without running code of the file."""
    for device in ("meta", "cpu"):  # The first reads no contents of tensors.
        buffer.seek(0)
        try:
            torch.load(buffer, map_location=device, weights_only=True)
        except Exception:  # noqa: BLE001 - torch raises errors of many types
            continue
        return True
    return False


def _unreadable(value: Any, where: tuple[str, ...]) -> tuple[tuple[str, ...], Any]:
    """Return the keys of the first value within ``value`` that cannot be read."""
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, part in inner:
        if not _is_readable(_saved(part)):
            return _unreadable(part, (*where, str(key)))
    return where, value


def read_tensors(path: Path) -> Any:
    """Return what ``torch.save`` wrote to a file.

    The checksums of the whole file are compared first, because ``torch.load`` ignores
    them: damaged weights would load as other weights.

    Args:
        path: of the file.

    Raises:
        ValueError: if the file is damaged; names it.
    """
    with path.open("rb") as file:
        try:
            # torch's format before 1.6 is no archive, and has no checksums.
            if file.read(len(_ARCHIVE)) == _ARCHIVE:
                _check(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises errors of many types.
            # torch's own message advises to load the file without any protection.
            size = file.seek(0, io.SEEK_END)
            reason = f": {error}" if isinstance(error, zipfile.BadZipFile) else ""
            raise ValueError(
                f"{path} is damaged, or holds no tensors: reading its {size:,} bytes "
                f"failed with {type(error).__name__}{reason}. save_policy writes such "
                "files; a run whose folder is deleted is trained again."
            ) from error


def _check(file: IO[bytes]) -> None:
    """Compare the contents of an archive with their checksums.

    Raises:
        zipfile.BadZipFile: if one differs, or the archive is damaged otherwise.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            with archive.open(record) as content:
                while content.read(_CHUNK):
                    pass


def policy_file(path: Path) -> Path:
    """Return the file that a path of ``load_policy`` stands for.

    Raises:
        FileNotFoundError: if there is none.
    """
    if path.is_file():
        return path
    if (path / CONFIG).is_file():
        if not (path / BEST).is_file():
            raise FileNotFoundError(
                f"{path} is the folder of a run, but {BEST} is missing."
            )
        return path / BEST
    runs = sorted(str(config.parent.relative_to(path)) for config in path.rglob(CONFIG))
    if len(runs) == 1:
        return policy_file(path / runs[0])
    if runs:
        raise FileNotFoundError(
            f"{path} has several runs: choose one of {', '.join(runs)}."
        )
    raise FileNotFoundError(
        f"Expected the file of a policy or the folder of a run, but {path} is neither. "
        "`marl-collect view` plays the episodes of a dataset."
    )


def _kind(state: Any) -> str:
    if isinstance(state, Mapping):
        return f"the entries {', '.join(list(map(str, state))[:4])}"
    return f"an object of type {type(state).__name__}"


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _check_fits(
    file: Path, saved: EnvDescription, env: EnvDescription, *, any_number: bool
) -> None:
    def parts(description: EnvDescription) -> dict[str, str]:
        return {
            name: f"{'' if any_number else f'{group.n_agents} agents, '}"
            f"observation {group.observation}, action {group.action}"
            f"{', one-hot' if group.one_hot else ''}"
            f"{', with action masks' if group.action_mask else ''}"
            for name, group in description.groups.items()
        }

    before, now = parts(saved), parts(env)
    for name in before | now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{file} has a policy for another environment: group {name!r} had "
                f"{before.get(name, 'no agents')}, but has "
                f"{now.get(name, 'no agents')}."
            )
