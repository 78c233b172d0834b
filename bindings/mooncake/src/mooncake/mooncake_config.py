"""The configuration of connectors: one JSON file, or environment variables.

``MOONCAKE_CONFIG_PATH`` names the file. Without it, ``MOONCAKE_MASTER`` has to be set, and these variables
are read:

====================================== =================================== ====================
Variable                               Field                               Default
====================================== =================================== ====================
``MOONCAKE_MASTER``                    ``master_server_address``           required
``MOONCAKE_LOCAL_HOSTNAME``            ``local_hostname``                  ``localhost``
``MOONCAKE_TE_META_DATA_SERVER``       ``metadata_server``                 ``P2PHANDSHAKE``
``MOONCAKE_GLOBAL_SEGMENT_SIZE``       ``global_segment_size``, bytes      3.125 GiB
``MOONCAKE_LOCAL_BUFFER_SIZE``         ``local_buffer_size``, bytes        1 GiB
``MOONCAKE_PROTOCOL``                  ``protocol``                        ``tcp``
``MOONCAKE_DEVICE``                    ``device_name``                     empty
``MOONCAKE_OFFLOAD_ENABLED``           ``enable_ssd_offload``              false
``MOONCAKE_OFFLOAD_FILE_STORAGE_PATH`` ``ssd_offload_path``                empty
``MOONCAKE_TENANT_ID``                 ``tenant_id``                       ``default``
``MOONCAKE_ENABLE_CLIENT_HTTP_SERVER`` ``enable_client_http_server``       false
``MOONCAKE_CLIENT_HTTP_PORT``          ``client_http_port``                9300
====================================== =================================== ====================

The file has the fields of :class:`MooncakeConfig` under their names; ``local_hostname``, ``metadata_server``
and ``master_server_address`` are required, the others have the defaults above. Other members are ignored: the
same file also has settings that only the connector of one engine reads.

A size is a number of bytes, or a text such as ``"512mb"`` or ``"1.5 gb"``, with powers of 1024.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1024**3
_DEFAULT_CLIENT_HTTP_PORT = 9300

_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_TRUE = frozenset({"1", "true", "yes", "on", "enable"})
_FALSE = frozenset({"", "0", "false", "no", "off", "disable"})

# Names of protocols that are in use, of this system or of the one whose configuration this is. Others are
# passed on with a warning: a name with a typing error is then found in the log.
_PROTOCOLS = frozenset(
    """
    ascend barex cxl efa hip maca musa nvlink nvlink_intra nvmeof rdma rpc_only shm sunrise_link tcp ub
    ubshmem
    """.split()
)
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_SIZES = ("global_segment_size", "local_buffer_size")


def _parse_segment_size(value: Any) -> int:
    """A size in bytes from a number, or from a text with an optional unit.

    Raises ``ValueError`` for a text that is empty, has no number, or has another unit.
    """
    if not isinstance(value, str):
        return int(value)
    text = value.strip().lower()
    if not text:
        raise ValueError("Invalid segment size: the text is empty; write bytes, or a unit as in '512mb'")
    digits = text.removesuffix("b")
    factor = _UNITS.get(digits[-1:], 1)
    if factor > 1:
        digits = digits[:-1]
    digits = digits.strip()
    if not digits:
        raise ValueError(f"Invalid segment size: no number before the unit in {value!r}")
    try:
        return int(digits) * factor
    except ValueError:
        pass
    try:
        return int(float(digits) * factor)
    except (ValueError, OverflowError):
        raise ValueError(
            f"Invalid segment size: {value!r}; write bytes, or a number with k, m, g, t, kb, mb, gb or tb"
        ) from None


def _parse_bool(value: Any) -> bool:
    """A truth value from JSON or from an environment variable.

    Raises ``ValueError`` for a text that is neither of the usual forms.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"Invalid boolean value: {value!r}; write true or false")


def _parse_port(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"Invalid client_http_port: {value!r} is not a number") from None


@dataclass
class MooncakeConfig:
    """What a connector passes to ``MooncakeDistributedStore.setup``.

    Sizes are bytes. ``protocol`` is brought to lower case; a name that is not known is passed on with a
    warning in the log. ``device_name`` is the RDMA device, or several separated by commas, or empty for all.

    Raises ``ValueError`` when a required field is empty, a size is negative, or ``protocol`` is no text.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = _DEFAULT_CLIENT_HTTP_PORT

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}; write a name such as 'tcp' or 'rdma'")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            logger.warning(
                "Unrecognised protocol %r: it is passed on as it is. Known names are %s",
                self.protocol,
                ", ".join(sorted(_PROTOCOLS)),
            )
        for name in _SIZES:
            size = getattr(self, name)
            if size < 0:
                raise ValueError(f"Invalid {name}: {size}; a size is 0 or more bytes")
        for name in _REQUIRED:
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"Invalid {name}: {text!r}; it has to be a text that is not empty")

    @staticmethod
    def from_file(file_path: str | os.PathLike[str]) -> MooncakeConfig:
        """The configuration in a JSON file.

        Raises ``OSError`` when the file cannot be read, and ``ValueError`` when it is not JSON, is no object,
        lacks a required member, or has a value that cannot be understood.
        """
        with open(file_path, encoding="utf-8") as file:
            members = json.load(file)
        if not isinstance(members, dict):
            raise ValueError(
                f"{os.fspath(file_path)} has to contain a JSON object, not {type(members).__name__}"
            )
        for name in _REQUIRED:
            if name not in members:
                raise ValueError(f"Missing required config field: {name}")
        return _from_members(members)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """The configuration in the file that ``MOONCAKE_CONFIG_PATH`` names, or in environment variables.

        Raises ``ValueError`` when neither that variable nor ``MOONCAKE_MASTER`` is set, and what
        :meth:`from_file` raises.
        """
        file_path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if file_path is not None:
            return MooncakeConfig.from_file(file_path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set."
            )
        members = {field: os.environ[name] for field, name in _VARIABLES.items() if name in os.environ}
        return _from_members({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **members})


_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


def _from_members(members: Mapping[str, Any]) -> MooncakeConfig:
    def text(name: str, default: str) -> str:
        value = members.get(name)
        return default if value is None else str(value)

    return MooncakeConfig(
        local_hostname=members["local_hostname"],
        metadata_server=members["metadata_server"],
        global_segment_size=_parse_segment_size(
            members.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)
        ),
        local_buffer_size=_parse_segment_size(members.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
        protocol=members.get("protocol", "tcp"),
        device_name=members.get("device_name", ""),
        master_server_address=members["master_server_address"],
        enable_ssd_offload=_parse_bool(members.get("enable_ssd_offload")),
        ssd_offload_path=text("ssd_offload_path", ""),
        tenant_id=text("tenant_id", "default"),
        enable_client_http_server=_parse_bool(members.get("enable_client_http_server")),
        client_http_port=_parse_port(members.get("client_http_port", _DEFAULT_CLIENT_HTTP_PORT)),
    )
