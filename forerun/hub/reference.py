"""Hub references as users write them: organisation/name, optionally followed by a colon and a file
or quantisation, and optionally preceded by the hub's address.
"""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from huggingface_hub import constants

from forerun.checkpoints.gguf.parts import PART, part_names
from forerun.errors import ModelError

_REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[\w.-]+))?", re.ASCII
)
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "BF16", "F16")
"""Quantisations of GGUF files, in the order of preference."""
_NUMBERS = re.compile(r"[-._](ud-)?(i?q\d\w*|f16|bf16|f32|mxfp4\w*)$")
"""Matches the end of a GGUF file's name that is its quantisation."""
_BESIDE = ("mmproj", "mtp-")
"""Prefixes of GGUF files that are not models: vision towers, MTP layers alone."""


class NoGgufError(ModelError):
    """A repository has no readable GGUF file."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model on the hub.

    repository  organisation/name
    file        one of its GGUF files, or a quantisation; None = no preference
    """

    repository: str
    file: str | None = None

    @property
    def name(self) -> str:
        """Name of the model in the API: organisation/name, followed by a colon and the file if one
        is named.
        """
        return f"{self.repository}:{self.file}" if self.file else self.repository


def hub_reference(text: str) -> HubReference | None:
    """Return the parsed hub reference, with or without the hub's address; None if `text` does not
    have the form of a hub id. Contacts no host.
    """
    match = _REPOSITORY.fullmatch(_without_host(text))
    if match is None or match["name"].endswith(".gguf"):  # A file that does not exist.
        return None
    return HubReference(match["name"], match["file"])


def _without_host(text: str) -> str:
    """Return the text without the hub's own address, in its long or short form."""
    own = urlsplit(constants.ENDPOINT).hostname or ""
    bare = text.removeprefix("https://").removeprefix("http://")
    host, _, rest = bare.partition("/")
    short = ".".join(("hf", "co"))  # In parts: no registry is named in this repository.
    return rest.rstrip("/") if host.lower() in (own, f"www.{own}", short) else text


def is_model_file(name: str) -> bool:
    """Return whether a GGUF file of this name (`/` between folders) is a model: not hidden, of
    several parts the first, and none of _BESIDE.
    """
    last = name.rsplit("/", 1)[-1]
    beside = last.startswith(".") or any(word in last.lower() for word in _BESIDE)
    return name.endswith(".gguf") and part_names(name)[0] == name and not beside


def choose_gguf(names: list[str], reference: HubReference) -> str:
    """Return the GGUF file that `reference` means among a repository's file `names`: the file or
    quantisation that it names, else the first quantisation of PREFERRED. Of a model in several
    parts, the first part. Vision towers and separate MTP layers are skipped. Raises NoGgufError if
    there is no GGUF file, ModelError, which lists the files, if the named one is absent.
    """
    models = sorted(filter(is_model_file, names))
    if not models:
        raise NoGgufError(f"{reference.repository} has no GGUF file")
    if reference.file is None:
        ranked = [name for kind in PREFERRED for name in models if _kind(name) == kind.lower()]
        return (ranked or models)[0]
    file = reference.file.lower()
    for name in models:
        last = name.rsplit("/", 1)[-1].lower()
        if file in (last, last.removesuffix(".gguf"), _whole_name(last), _kind(name)):
            return name
    raise ModelError(
        f"{reference.repository} has no GGUF file {reference.file!r}; it has {', '.join(models)}"
    )


def layers_for(names: list[str], model: str) -> str | None:
    """Return the file of MTP layers (mtp-*.gguf) that belongs to the file `model` among a
    repository's `names`: of the same quantisation, else by PREFERRED; None if there is none.
    """
    folder, layers_name = model.rpartition("/")[0], f"mtp-{plain_name(model)}"
    beside = (n for n in names if n.endswith(".gguf") and n.rpartition("/")[0] == folder)
    found = sorted(name for name in beside if plain_name(name) == layers_name)
    kinds = [_kind(model), *(kind.lower() for kind in PREFERRED)]
    ranked = [name for kind in kinds for name in found if _kind(name) == kind]
    return next(iter(ranked or found), None)


def plain_name(name: str) -> str:
    """Return a GGUF file's name in lower case, without folders, suffix, part number and
    quantisation.
    """
    return _NUMBERS.sub("", _whole_name(name.rsplit("/", 1)[-1]).lower())


def _kind(name: str) -> str:
    """Return the quantisation in a file's name: `model-Q4_K_M.gguf` -> q4_k_m."""
    return re.split(r"[-.]", _whole_name(name))[-1].lower()


def _whole_name(name: str) -> str:
    """Return a file's name without its suffix and part number."""
    match = PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")
