# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises of the code: nothing is unpickled or evaluated, secrets are neither printed nor typed."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import seer
from seer.cli.main import build_parser
from seer.cli.reference import verbs_of
from seer.cli.serve import _refused_key

SANDBOX = "sandbox_main.py"
"""Runs a model's code in a process without rights, which is what it is for (unit/environments/test_sandbox.py)."""
SOURCES = sorted(path for path in Path(seer.__file__).parent.rglob("*.py") if path.name != SANDBOX)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
FORBIDDEN_CALLS = {
    "torch.load": "weights are safetensors",
    "eval": "it runs code",
    "exec": "it runs code",
    "os.system": "it starts a shell",
    "os.popen": "it starts a shell",
    "tempfile.mktemp": "another user can take the name first",
}
UNPICKLING = {
    "stateless_init_process_group",
    "StatelessProcessGroup.create",
    "recv_pyobj",
    "recv_obj",
    "broadcast_object_list",
    "recv_object_list",
    "scatter_object_list",
    "all_gather_object",
    "gather_object",
    "Pipe",
}
"""Functions of others, by the ends of their names, that unpickle what another process sends."""
MAY_UNPICKLE = {
    "engine/vllm/nccl_rendezvous.py": {"StatelessProcessGroup.create"},  # its methods that unpickle are replaced
    "integrations/trl/ranks.py": {"broadcast_object_list", "gather_object"},  # ranks of one trainer, which trust all
    "kvpool/bench.py": {"Pipe"},  # inherited by the one child at the other end
}
REQUIRED_KEYWORDS = {"np.load": ("allow_pickle", False), "from_pretrained": ("use_safetensors", True)}


def problems(tree: ast.AST, allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """What a module does that it must not; `allowed` are names of UNPICKLING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"line {node.lineno}: imports {one}" for one in names if one.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.ImportFrom):  # under whatever name it is called
            taken = {alias.name for alias in node.names} & UNPICKLING - allowed
            yield from (f"line {node.lineno}: {one} unpickles what others send" for one in sorted(taken))
        if isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {problem}" for problem in _problems_of(node, allowed))


def _problems_of(call: ast.Call, allowed: frozenset[str]) -> Iterator[str]:
    name = ast.unparse(call.func).replace("numpy.", "np.")
    keywords = {one.arg: getattr(one.value, "value", None) for one in call.keywords}
    if name in FORBIDDEN_CALLS:
        yield f"{name}: {FORBIDDEN_CALLS[name]}"
    for ending in UNPICKLING - allowed:
        if name == ending or name.endswith(f".{ending}"):
            yield f"{name} unpickles what others send"
    for ending, (keyword, value) in REQUIRED_KEYWORDS.items():
        if (name == ending or name.endswith(f".{ending}")) and keywords.get(keyword) is not value:
            yield f"{name} without {keyword}={value}"
    if keywords.get("shell") is True or keywords.get("trust_remote_code") is True:
        yield f"{name} with a shell, or with code of a model"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    allowed = frozenset(MAY_UNPICKLE.get(path.relative_to(SOURCES[0].parent).as_posix(), ()))
    assert list(problems(ast.parse(path.read_text()), allowed)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load('x')",
        "np.load('x')",
        "numpy.load('x', allow_pickle=True)",
        "eval('1')",
        "subprocess.run('x', shell=True)",
        "AutoModel.from_pretrained('x')",
        "from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group as join",
        "nccl_common.stateless_init_process_group('x', 1, 1, 2, device=0)",
        "StatelessProcessGroup.create('x', 1, 1, 2)",
        "socket.recv_pyobj()",
        "torch.distributed.broadcast_object_list([None])",
        "AutoTokenizer.from_pretrained('x', use_safetensors=True, trust_remote_code=True)",
    ],
)
def test_what_is_forbidden_is_found(code: str) -> None:
    assert list(problems(ast.parse(code)))


def test_no_secret_is_an_argument_of_a_command() -> None:
    """Other users see command lines. Options about keys take the path of a file or folder, or refuse every value."""
    for _, parser in verbs_of(build_parser()):
        for action in parser._actions:
            words = set("-".join(action.option_strings).split("-"))
            if words & {"key", "keys", "secret", "password", "passphrase", "credential"}:
                is_refused = action.help == argparse.SUPPRESS and action.type is _refused_key
                is_path = action.type is Path or isinstance(action, argparse._StoreTrueAction)
                assert is_path or is_refused, action.option_strings


def test_no_secret_is_printed_with_its_object() -> None:
    found = 0
    for path in SOURCES:
        if "secret" not in path.read_text() or path.name == "__init__.py":
            continue
        module = importlib.import_module(".".join(("seer", *path.relative_to(SOURCES[0].parent).with_suffix("").parts)))
        for kind in vars(module).values():
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__):
                continue
            for field in dataclasses.fields(kind):
                if "secret" in field.name:
                    found += 1
                    assert not field.repr, f"{kind.__name__}.{field.name} shows in messages and logs"
    assert found >= 2
