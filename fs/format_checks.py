"""Whether a checkpoint file opens as what it says it is: the outermost structure only, from its own lengths and checksums.

What is looked at: of zip files (`.pt` of torch, `.npz`, and whatever begins as one) every member's checksum; of `.safetensors`
that the tensors cover the file exactly; of `.npy` that the array its header describes is all there; of HDF5 that the file is as
long as its superblock says. Not looked at: what is in a pickle (`.pt` files older than torch 1.6), arrays of objects, the
groups and data sets of HDF5. A file of no known format passes: ckptfs keeps any bytes.
"""

import ast
import json
import math
import os
import re
import struct
import zipfile
from pathlib import Path

SAFETENSORS_HEADER_SIZE_MAX = 100 << 20
NPY_HEADER_SIZE_MAX = 1 << 20

PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
"""`torch.save` before 1.6 began with a pickled number; plain pickles are saved under this name too."""

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
HDF5_OFFSETS_MAX = 32
"""The superblock stands at 0, or at 512 bytes and every doubling of that, behind what a program put before it."""


def check_format(path: Path) -> str | None:
    """What is wrong with the file's format, or None. Reads zip members in full, of the others the header. Raises nothing."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
        if head.startswith(b"PK\x03\x04"):
            return _check_zip(path)
        if path.suffix == ".safetensors":
            return _check_safetensors(path, head)
        if path.suffix == ".npz":
            return "not a zip file, as .npz files are: its signature is missing"
        if path.suffix == ".pt" and not head.startswith(PICKLE_STARTS):
            return "neither a zip file nor a pickle, as files of torch are"
        if path.suffix in (".h5", ".hdf5") or head.startswith(HDF5_SIGNATURE):
            return _check_hdf5(path)
        if path.suffix == ".npy":
            return _check_npy(path)
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


def _check_npy(path: Path) -> str | None:
    """The header, and that the file is as long as dtype and shape say. The length of dtypes with objects in them is free."""
    with open(path, "rb") as file:
        head = file.read(12)
        if not head.startswith(b"\x93NUMPY"):
            return "not a numpy file: its signature is missing"
        if len(head) < 12:
            return "a numpy file that ends inside its header"
        is_old = head[6] == 1
        header_size = struct.unpack_from("<H" if is_old else "<I", head, 8)[0]
        start = (10 if is_old else 12) + header_size
        file.seek(10 if is_old else 12)
        text = file.read(min(header_size, NPY_HEADER_SIZE_MAX))
    if len(text) < header_size:
        return "a numpy file that ends inside its header"
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        item_size = _item_size(header["descr"])
        count = math.prod(int(length) for length in header["shape"])
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        return "a numpy file whose header can't be read"
    size = os.path.getsize(path)
    if item_size is None or start + item_size * count <= size:
        return None  # more arrays may stand behind the first: numpy.save may be called again on an open file
    return f"a numpy file cut short: its array ends at {start + item_size * count} bytes, the file has {size}"


def _item_size(descr: object) -> int | None:
    """Bytes of one item of that dtype; None for objects. Raises `ValueError` for what is no dtype."""
    if isinstance(descr, str):
        found = re.fullmatch(r"[<>|=]?([?biufcmMSUVOa])(\d*)(\[[^]]*\])?", descr)
        if found is None:
            raise ValueError(descr)
        if found[1] == "O":
            return None
        return int(found[2] or 1) * (4 if found[1] == "U" else 1)
    if isinstance(descr, tuple) and len(descr) == 2:  # an array in each item
        size = _item_size(descr[0])
        shape = descr[1] if isinstance(descr[1], tuple) else (descr[1],)
        return None if size is None else size * math.prod(int(length) for length in shape)
    if isinstance(descr, list):  # fields
        sizes = [_item_size(field[1] if len(field) == 2 else (field[1], field[2])) for field in descr]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    raise ValueError(descr)


def _check_hdf5(path: Path) -> str | None:
    """The superblock's address of the end of the file, from the base address on."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        offset = 0
        for number in range(HDF5_OFFSETS_MAX):
            offset = 256 << number if number else 0
            if offset >= size:
                break
            file.seek(offset)
            block = file.read(96)
            if block.startswith(HDF5_SIGNATURE):
                return _check_superblock(block, offset, size)
    return "not an HDF5 file: its signature is missing"


def _check_superblock(block: bytes, offset: int, size: int) -> str | None:
    try:
        version = block[8]
        if version > 3:
            return None  # of a newer library
        width = block[13] if version < 2 else block[9]
        addresses = {0: 24, 1: 28, 2: 12, 3: 12}[version]
        if width not in (2, 4, 8):
            return "an HDF5 file whose superblock can't be read"
        field = block[addresses + 2 * width : addresses + 3 * width]
    except IndexError:
        return "an HDF5 file that ends inside its superblock"
    if len(field) < width:
        return "an HDF5 file that ends inside its superblock"
    base, end = int.from_bytes(block[addresses : addresses + width], "little"), int.from_bytes(field, "little")
    # The end is counted from the file's beginning; where a block of the user's was put before it later, from the base address.
    shift = offset - base if offset > base else 0
    return None if end + shift <= size else f"an HDF5 file cut short: it ends at {end + shift} bytes, the file has {size}"


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
