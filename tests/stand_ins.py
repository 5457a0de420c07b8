"""Empty stand-ins for the CUDA libraries that a torch wheel links to, so that a host without a GPU can import it.

A wheel from PyPI is 0.5 GB; the CUDA packages that it requires are 4 GB more. A host without a GPU never calls them,
but the loader wants every library and every symbol. readelf lists both, gcc compiles a library of functions that return
an error for each. `torch.cuda.is_available()` is then False; CPU tensors, gloo and fake process groups work.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# Libraries of the system and of the compiler.
SYSTEM = re.compile(r"lib(c|m|pthread|dl|rt|gcc_s|stdc\+\+|z|quadmath|util)\.so|ld-linux")
# Library to how its functions' names begin, for symbols that the wheel wants without saying from where.
BEGINNINGS = {
    "libnccl.so": "nccl",
    "libcufile.so": "cuFile",
    "libcusparseLt.so": "cusparseLt",
    "libnvshmem_host.so": "nvshmem",
    "libcudnn.so": "cudnn",
    "libcublas.so": "cublas",
    "libcuda.so": "cu[A-Z]",
}
GIVES_TEXT = re.compile(r"\w+Get(Last)?(Error|Status)(String|Name)?$")
FAILS = 100  # cudaErrorNoDevice
BODIES = {
    "cudaGetLastError": "int {name}(void) {{ return 0; }}",
    "cudaPeekAtLastError": "int {name}(void) {{ return 0; }}",
    "cudaGetDeviceCount": "int {name}(int *count) {{ *count = 0; return 100; }}",
    "cudaRuntimeGetVersion": "int {name}(int *version) {{ *version = 0; return 0; }}",
    "cudaDriverGetVersion": "int {name}(int *version) {{ *version = 0; return 0; }}",
    "ncclGetVersion": "int {name}(int *version) {{ *version = 22900; return 0; }}",
}


class Symbol(NamedTuple):
    """What a library must define: its version in the library's version script, "" for none, and its ELF type."""

    version: str
    kind: str


def make_stand_ins(torch_folder: Path, work: Path) -> list[str]:
    """Compile a stand-in for each library that a torch lacks into its lib folder; their names.

    Raises:
        OSError, subprocess.CalledProcessError: there is no readelf or gcc, or one of them failed.
    """
    lib = torch_folder / "lib"
    wanted = _wanted(lib)
    work.mkdir(parents=True, exist_ok=True)
    for library, symbols in wanted.items():
        _compile(library, symbols, lib, work)
    return sorted(wanted)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _wanted(lib: Path) -> dict[str, dict[str, Symbol]]:
    """Library that is not there to the symbols that it must define, by name."""
    files = [path for path in lib.glob("*.so*") if path.is_file()]
    there = {path.name for path in lib.iterdir()}
    wanted: dict[str, dict[str, Symbol]] = {}
    unversioned: dict[str, Symbol] = {}
    defined: set[str] = set()
    for path in files:
        for library in re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-dW", str(path))):
            if library not in there and not SYSTEM.match(library):
                wanted.setdefault(library, {})
    for path in files:
        library_of = _libraries_of_versions(path)
        for line in _output("readelf", "-W", "--dyn-syms", str(path)).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            kind, binding, section, (name, _, version) = fields[3], fields[4], fields[6], fields[7].partition("@")
            version = version.lstrip("@")
            if section != "UND":
                defined.add(name)
            elif version and library_of.get(version) in wanted:
                wanted[library_of[version]][name] = Symbol(version, kind)
            elif not version and binding != "WEAK":
                unversioned[name] = Symbol("", kind)
    for name, symbol in unversioned.items():
        begins = [start for start, beginning in BEGINNINGS.items() if re.match(beginning, name)]
        home = next((library for start in begins for library in wanted if library.startswith(start)), None)
        if home is not None and name not in defined:
            wanted[home].setdefault(name, symbol)
    return wanted


def _libraries_of_versions(path: Path) -> dict[str, str]:
    """Symbol version, such as libcudart.so.13, to the library that a file wants it from."""
    library, result = "", {}
    for line in _output("readelf", "-VW", str(path)).splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags: .*Version: (\d+)", line):
            result[match[1]] = library
    return result


def _compile(library: str, symbols: dict[str, Symbol], lib: Path, work: Path) -> None:
    source = work / f"{library}.c"
    source.write_text("".join(f"{_definition(name, symbol)}\n" for name, symbol in sorted(symbols.items())))
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-O1", str(source)]
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, symbol in symbols.items():
        if symbol.version:
            names_of[symbol.version].append(name)
    if names_of:
        script = source.with_suffix(".map")
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in names_of.items())
        )
        command.append(f"-Wl,--version-script={script}")
    _output(*command, f"-Wl,-soname,{library}", "-o", str(lib / library))


def _definition(name: str, symbol: Symbol) -> str:
    if symbol.kind == "OBJECT":
        return f"char {name}[4096];"
    if name in BODIES:
        return BODIES[name].format(name=name)
    if GIVES_TEXT.match(name):
        return f'const char *{name}(void) {{ return "a stand-in of the CUDA libraries: there is no GPU"; }}'
    if name.startswith("__cudaRegisterFatBinary"):
        return f"static void *handle[4]; void *{name}(void) {{ return handle; }}"
    return f"long {name}(void) {{ return {FAILS}; }}"
