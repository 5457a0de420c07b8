"""Names of modules, as everything that tells about them writes them."""


def folded(name: str) -> str:
    """A module's name with the numbers of layers left out: `layers.3.wq` is `layers.*.wq`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
