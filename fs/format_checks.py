"""Whether a checkpoint file opens as what it says it is: the outermost structure only, from its own lengths and checksums.

A file of no known format passes: ckptfs keeps any bytes.
"""

import json
import os
import struct
import zipfile
from pathlib import Path

SAFETENSORS_HEADER_SIZE_MAX = 100 << 20


def check_format(path: Path) -> str | None:
    """What is wrong with the file's format, or None. Reads zip members in full, of the others the header. Raises nothing."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
        if head.startswith(b"PK\x03\x04"):
            return _check_zip(path)
        if path.suffix == ".safetensors":
            return _check_safetensors(path, head)
        if path.suffix in (".h5", ".hdf5") and not head.startswith(b"\x89HDF\r\n\x1a\n"):
            return "not an HDF5 file: its signature is missing"
        if path.suffix == ".npy" and not head.startswith(b"\x93NUMPY"):
            return "not a numpy file: its signature is missing"
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    return None


def _check_zip(path: Path) -> str | None:
    """`torch.save` and `.npz` write zip files."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        return f"a zip file that can't be opened: {error}"
    return None if wrong is None else f"its member {wrong} fails its checksum"


def _check_safetensors(path: Path, head: bytes) -> str | None:
    """Header length, JSON header, and data offsets that cover the rest of the file exactly."""
    size_bytes = os.path.getsize(path)
    if len(head) < 8:
        return "a safetensors file that ends inside its header"
    (header_size,) = struct.unpack_from("<Q", head)
    if header_size > min(SAFETENSORS_HEADER_SIZE_MAX, size_bytes - 8):
        return "a safetensors file whose header is longer than the file"
    with open(path, "rb") as file:
        file.seek(8)
        text = file.read(header_size)
    try:
        header = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "a safetensors file whose header can't be read"
    return None if 8 + header_size + end == size_bytes else "a safetensors file whose tensors don't fit its length"
