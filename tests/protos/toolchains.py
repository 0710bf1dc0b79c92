"""Builds clients in other languages where the tools are installed; skips them with a reason otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.compiler.plugin_pb2 import CodeGeneratorResponse

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
CLIENTS = PROTOS / "clients"
AREAS = {
    area: sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "quire" / area).rglob("*.proto"))
    for area in ("common", "inference")
}
MADE_OF = [*AREAS["common"], *AREAS["inference"]]
NODE_PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader", "protobufjs")
GO_SOURCES = Path("/usr/share/gocode")  # Debian's
JARS = Path("/usr/share/java")  # Debian's
NETTY = ("buffer", "codec", "codec-http", "codec-http2", "common", "handler", "resolver", "transport")
NEEDED_JARS = (
    "grpc-api",
    "grpc-context",
    "grpc-core",
    "grpc-netty",
    "grpc-protobuf",
    "grpc-protobuf-lite",
    "grpc-stub",
    "guava",
    *(f"netty-{part}" for part in NETTY),
    "perfmark-api",
    "protobuf",
)

Command = list[str]
Build = Callable[[Path], Command]  # into a folder -> what runs the client


def needed(*programs: str, of: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: {of}")


def run(*command: str, folder: Path | None = None, **environment: str) -> None:
    done = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def compiled(*options: str) -> None:
    """Compiles the protos with the protoc of the dev dependencies, unless a plugin needs its own."""
    run(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *options, *MADE_OF)


def python(out: Path) -> Command:
    compiled(f"--python_out={out}", f"--grpc_python_out={out}")
    return ["env", f"PYTHONPATH={out}", sys.executable, str(CLIENTS / "client.py")]


def python_by_reflection(out: Path) -> Command:
    return [sys.executable, str(CLIENTS / "reflected.py")]


def _needs_ruby() -> None:
    needed("ruby", of="apt-get install ruby-grpc")
    has_grpc = ("ruby", "-e", 'require "grpc"; require "google/protobuf/descriptor_pb"')
    if subprocess.run(has_grpc, capture_output=True, check=False).returncode:
        pytest.skip("needs ruby's gRPC: apt-get install ruby-grpc")


def ruby(out: Path) -> Command:
    _needs_ruby()
    compiled("--include_imports", f"--descriptor_set_out={out / 'descriptors.bin'}")
    return ["ruby", str(CLIENTS / "client.rb"), str(out / "descriptors.bin")]


def ruby_by_reflection(out: Path) -> Command:
    _needs_ruby()
    return ["ruby", str(CLIENTS / "reflected.rb")]


def _node_with_packages() -> Command:
    needed("node", of="apt-get install nodejs")
    packages = os.environ.get("TEST_NODE_MODULES", "")
    if not all((Path(packages) / name).is_dir() for name in NODE_PACKAGES):
        pytest.skip(f"needs TEST_NODE_MODULES=FOLDER/node_modules: npm install {' '.join(NODE_PACKAGES)}")
    return ["env", f"NODE_PATH={packages}", "node"]


def node(out: Path) -> Command:
    return [*_node_with_packages(), str(CLIENTS / "client.js"), str(PROTOS)]


def node_by_reflection(out: Path) -> Command:
    return [*_node_with_packages(), str(CLIENTS / "reflected.js")]


def _knows_optional_fields(plugin: str) -> bool:
    """Whether a plugin supports optional fields, by its reported features. Debian's 1.3 does not; its 1.5 does, and
    knows no --version."""
    told = subprocess.run([plugin], input=b"", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    features = CodeGeneratorResponse.FromString(told).supported_features
    return bool(features & CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)


def _needs_go() -> None:
    needed("go", of="apt-get install golang-go")
    if not (GO_SOURCES / "src" / "google.golang.org" / "grpc").is_dir():
        pytest.skip("needs Go's gRPC: apt-get install golang-google-grpc-dev")
    if not (GO_SOURCES / "src" / "google.golang.org" / "protobuf").is_dir():
        pytest.skip("needs Go's protobuf of today: apt-get install golang-github-golang-protobuf-1-5-dev")


def _go_built(name: str, out: Path) -> Command:
    """Builds a Go program with the code that protoc generated in OUT/src."""
    (out / "src" / name).mkdir(parents=True)
    shutil.copy(CLIENTS / f"{name}.go", out / "src" / name)
    program = str(out / name)
    run("go", "build", "-o", program, name, GOPATH=f"{out}:{GO_SOURCES}", GO111MODULE="off")
    return [program]


def go(out: Path) -> Command:
    of = "apt-get install protobuf-compiler protoc-gen-go-1-5 protoc-gen-go-grpc"
    needed("protoc", "protoc-gen-go", "protoc-gen-go-grpc", of=of)
    if not _knows_optional_fields("protoc-gen-go"):
        pytest.skip("needs a protoc-gen-go that knows optional fields: apt-get install protoc-gen-go-1-5")
    _needs_go()
    sources = out / "src"
    sources.mkdir()
    named = ",".join(f"M{name}=quirepb/{name.split('/')[1]}" for name in MADE_OF)
    plugins = [f"--go_out={sources}", f"--go-grpc_out={sources}", f"--go_opt={named}", f"--go-grpc_opt={named}"]
    for files in AREAS.values():  # a Go package at a time
        run("protoc", f"-I{PROTOS}", *plugins, *files)
    return _go_built("client", out)


def go_by_reflection(out: Path) -> Command:
    _needs_go()
    return _go_built("reflected", out)


def _cpp_built(name: str, out: Path) -> Command:
    """Builds a C++ program with the code that protoc generated in OUT."""
    needed("g++", "pkg-config", of="apt-get install g++ pkg-config")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "grpc++", "protobuf"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        pytest.skip("needs C++'s gRPC: apt-get install libgrpc++-dev libprotobuf-dev")
    files = [str(path) for path in sorted(out.rglob("*.cc"))]
    program = str(out / name)
    run("g++", "-O0", f"-I{out}", str(CLIENTS / f"{name}.cc"), *files, "-o", program, *flags.stdout.split())
    return [program]


def cpp(out: Path) -> Command:
    needed("protoc", "grpc_cpp_plugin", of="apt-get install libgrpc++-dev protobuf-compiler-grpc")
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    run("protoc", f"-I{PROTOS}", f"--cpp_out={out}", f"--grpc_out={out}", plugin, *MADE_OF)
    return _cpp_built("client", out)


def cpp_by_reflection(out: Path) -> Command:
    return _cpp_built("reflected", out)


def _java_built(name: str, out: Path) -> Command:
    """Builds a Java program with the code that protoc generated in OUT."""
    needed("javac", "java", of="apt-get install default-jdk-headless")
    jars = [JARS / f"{jar}.jar" for jar in NEEDED_JARS]
    for jar in jars:
        if not jar.exists():
            pytest.skip(f"needs {jar}: apt-get install libgrpc-java libprotobuf-java libnetty-java libperfmark-java")
    path = ":".join([str(out), *map(str, jars)])
    sources = [str(file) for file in sorted(out.rglob("*.java"))]
    run("javac", "-nowarn", "-cp", path, "-d", str(out), str(CLIENTS / f"{name}.java"), *sources)
    return ["java", "-cp", path, name]


def java(out: Path) -> Command:
    needed("protoc", of="apt-get install protobuf-compiler")
    run("protoc", f"-I{PROTOS}", f"--java_out={out}", *MADE_OF)
    return _java_built("Client", out)


def java_by_reflection(out: Path) -> Command:
    return _java_built("Reflected", out)


BUILDS: dict[str, Build] = {
    "python": python,
    "ruby": ruby,
    "node": node,
    "go": go,
    "c++": cpp,
    "java": java,
}
BY_REFLECTION: dict[str, Build] = {
    "python": python_by_reflection,
    "ruby": ruby_by_reflection,
    "node": node_by_reflection,
    "go": go_by_reflection,
    "c++": cpp_by_reflection,
    "java": java_by_reflection,
}
SLOW = {"go", "c++", "java"}  # which compile for seconds
