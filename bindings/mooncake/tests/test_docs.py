"""The commands of ``docs/integrations``: every block that is marked ``sh run`` runs as it stands.

Port numbers are replaced by free ones, and after a command that ends with ``&`` the next waits until its
ports are listening. A block that fails fails the page, with its output.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cluster
import pytest

DOCS = Path(__file__).parents[3] / "docs" / "integrations"
PORTS = ("50051", "50052", "9003", "8080")
BLOCK_S = 90


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    text: str


def blocks(path: Path) -> list[Block]:
    """The blocks of a page that run."""
    found = []
    for match in re.finditer(r"^```sh run\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        line = path.read_text()[: match.start()].count("\n") + 1
        found.append(Block(path.name, line, match[1]))
    return found


def script(block: Block, ports: dict[str, str]) -> str:
    """The block as a script that waits for the processes that it starts."""
    lines = ["set -euo pipefail"]
    for line in block.text.splitlines():
        for documented, free in ports.items():
            line = re.sub(rf"\b{documented}\b", free, line)
        lines.append(line)
        if line.rstrip().endswith("&"):
            # A process listens at the ports that its flags name, except that of the master it connects to.
            own = re.sub(r"--\w*(server_address|metadata_server)\w*[= ]\S+", "", line)
            own_ports = [free for free in ports.values() if re.search(rf"\b{free}\b", own)]
            lines.append(f"wait_for $! {' '.join(own_ports)}")
    return "\n".join(lines) + "\n"


WAIT = """
wait_for() {
    local process=$1; shift
    for port in "$@"; do
        for _ in $(seq 400); do
            (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null && break
            kill -0 "$process" || { echo "the process that should listen on $port has ended"; exit 1; }
            sleep 0.05
        done
        (exec 3<>/dev/tcp/127.0.0.1/$port)
    done
}
"""


ALL = [block for path in sorted(DOCS.glob("*.md")) for block in blocks(path)]


def test_every_engine_has_a_page_and_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert len(pages) == 8 and len(ALL) >= 8


def test_ports_are_replaced_and_waited_for() -> None:
    block = Block("p.md", 1, "mooncake_client --port=50052 --master_server_address=127.0.0.1:50051 &\n")
    made = script(block, {"50051": "1111", "50052": "2222"})
    assert made.splitlines()[1:] == [
        "mooncake_client --port=2222 --master_server_address=127.0.0.1:1111 &",
        "wait_for $! 2222",
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("block", ALL, ids=lambda block: f"{block.page}:{block.line}")
def test_the_commands_of_a_page(block: Block, tmp_path: Path) -> None:
    ports = {documented: str(cluster.free_port()) for documented in PORTS}
    scripts = Path(sys.executable).parent
    running = subprocess.Popen(
        ["bash", "-c", WAIT + script(block, ports)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "log"
    try:
        # The processes in the background keep the pipe open, so the end of the shell is what counts.
        code = running.wait(BLOCK_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        assert running.stdout is not None
        log.write_text(running.stdout.read())
    assert code == 0, f"{block.page}:{block.line}\n{log.read_text()}"
