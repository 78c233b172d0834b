"""The configuration: files, environment variables, sizes, and what is refused with which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake.mooncake_config import MooncakeConfig, _parse_bool, _parse_segment_size

REQUIRED = {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1"}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("0", 0),
        ("4 GB", 4 << 30),
        ("4gB ", 4 << 30),
        ("1.5 kb", 1536),
        ("2t", 2 << 40),
        ("16777216.0", 1 << 24),
        # More digits than a float has: the size stays exact.
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_bytes_or_have_a_unit(text: object, size: int) -> None:
    assert _parse_segment_size(text) == size


@pytest.mark.parametrize("text", ["", " ", "mb", "four gb", "1 pb", "50%", "inf", "nan gb", "1bb"])
def test_a_size_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid segment size"):
        _parse_segment_size(text)


@pytest.mark.parametrize("value", [None, "", "off", "No", 0, False])
def test_what_is_false(value: object) -> None:
    assert _parse_bool(value) is False


def test_a_truth_value_with_a_typing_error_is_refused() -> None:
    with pytest.raises(ValueError, match="'ture'"):
        _parse_bool("ture")


def test_other_members_of_the_file_are_ignored(tmp_path: Path) -> None:
    config = MooncakeConfig.from_file(
        written(tmp_path, {**REQUIRED, "mode": "embedded", "transfer_timeout": 1})
    )
    assert (config.protocol, config.global_segment_size, config.client_http_port) == ("tcp", 3355443200, 9300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "has to contain a JSON object, not list"),
        ("{", "Expecting property name"),
        ({"local_hostname": "a"}, "Missing required config field: metadata_server"),
        ({**REQUIRED, "client_http_port": "http"}, "client_http_port"),
        ({**REQUIRED, "global_segment_size": "-1"}, "Invalid global_segment_size: -1"),
        ({**REQUIRED, "local_hostname": 7}, "Invalid local_hostname: 7"),
        ({**REQUIRED, "protocol": ["tcp"]}, "Invalid protocol"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MooncakeConfig.from_file(written(tmp_path, content))


def test_the_environment_is_read_when_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "512mb")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "RDMA")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    assert (config.local_buffer_size, config.protocol) == (512 << 20, "rdma")


def test_the_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(written(tmp_path, REQUIRED)))
    monkeypatch.setenv("MOONCAKE_MASTER", "other:2")
    assert MooncakeConfig.load_from_env().master_server_address == "m:1"
