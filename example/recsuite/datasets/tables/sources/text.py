"""The bytes of a text file as UTF-8: unpacked, decoded, without a mark, and counted as they are read."""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recsuite.datasets.tables.sources.remote import RemoteFile, is_remote
from recsuite.errors import UserError, printable

if TYPE_CHECKING:
    from recsuite.datasets.tables.sources.file import File

BLOCK_BYTES = 2**20
# Of a text, to find its first line in.
HEAD_BYTES = 2**23
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
# How files begin that are none of the formats that are read.
FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file of version 1",
}
# What a schema.toml may name; the most usual besides UTF-8 first.
ENCODINGS = ("latin-1", "utf-16", "utf-8")
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


@contextlib.contextmanager
def explained_damage(file: File) -> Iterator[None]:
    """Give whatever a reader finds wrong with a file as one sentence.

    Raises:
        UserError: names the file.
    """
    import pyarrow

    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError, OverflowError) as error:
        reason = printable(str(error).split("\n")[0].rstrip(".")) or type(error).__name__
        raise UserError(
            f"{file} cannot be read as {file.format} ({reason}); write it again, or take it out."
        ) from error


class CountedFile(io.BufferedReader):
    """The bytes as they lie on the disk, or behind a URL, and how many of them were read."""

    def __init__(self, path: str) -> None:
        raw: Any = RemoteFile(path) if is_remote(path) else io.FileIO(path)
        super().__init__(raw, BLOCK_BYTES)
        self.done = 0

    def read(self, size: int | None = -1) -> bytes:
        """Up to so many bytes."""
        block = super().read(size)
        self.done += len(block)
        return block


class TextFile:
    """The text of a file, in UTF-8 without a mark, in blocks. Not for random access.

    is_wide: whether blocks are as large as is asked for, where that is worth the memory.

    Raises:
        UserError: for a file that is empty, not text, or not in its encoding.
    """

    def __init__(self, file: File) -> None:
        self.file, self.closed, self.is_wide = file, False, False
        with explained_damage(file):
            self._counted = CountedFile(file.path)
        start = self._counted.peek(8)
        if not start:
            raise UserError(f"{file} is empty; write it again, or take it out.")
        packed = next((kind for mark, kind in PACKED.items() if start.startswith(mark)), "")
        if file.compression and not packed and b"\0" in self._counted.peek(BLOCK_BYTES):
            raise UserError(
                f"{file} is not packed with {file.compression}, as the end of its name says; give its name "
                "the right end, or write it again."
            )
        self._source: Any = self._unpacked(packed) if packed else self._counted
        # The mark of UTF-8 is no text in any other encoding either.
        self._rest = self._raw_block().removeprefix(codecs.BOM_UTF8)
        self._decoder = self._decoder_of(self._rest)
        # Of all encodings, this is how the mark begins a text.
        self._rest = self._decoded(self._rest).removeprefix(codecs.BOM_UTF8)
        while b"\n" not in self._rest and len(self._rest) < HEAD_BYTES and (block := self._raw_block()):
            self._rest += self._decoded(block)

    @property
    def head(self) -> bytes:
        """How the text begins, with its first line where that is no longer than 8 MiB; still to be read."""
        return self._rest

    @property
    def done(self) -> int:
        """How many bytes of the file were read, packed as they are."""
        return self._counted.done

    def read(self, size: int = -1) -> bytes:
        """Up to so many bytes, none at the end; all that is left for -1."""
        if size < 0:
            return b"".join(iter(lambda: self.read(BLOCK_BYTES), b""))
        while not self._rest or (self.is_wide and len(self._rest) < size):
            block = self._raw_block()
            self._rest += self._decoded(block)
            if not block:
                break
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def readable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """End it."""
        self.closed = True
        self._counted.close()

    def _unpacked(self, kind: str) -> Any:
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(self._counted, mode="r"), kind)

    def _raw_block(self) -> bytes:
        with explained_damage(self.file):
            return bytes(self._source.read(BLOCK_BYTES))

    def _decoder_of(self, start: bytes) -> codecs.IncrementalDecoder:
        """What turns the bytes into text."""
        if start.startswith(UTF32):
            raise UserError(f"{self.file} is text in UTF-32; convert it with iconv -f UTF-32 -t UTF-8.")
        what = next((what for mark, what in FOREIGN.items() if start.startswith(mark)), "")
        if what:
            raise UserError(f"{self.file} is {what}, not text; give its name the right end, or unpack it.")
        name = "utf-16" if start.startswith(UTF16) else self.file.encoding
        # Without a mark, the first character tells: it is an ASCII one.
        if name.lower().replace("_", "-") == "utf-16" and not start.startswith(UTF16):
            name = "utf-16-be" if start.startswith(b"\0") else "utf-16-le"
        try:
            return codecs.getincrementaldecoder(name)()
        except LookupError:
            raise UserError(
                f"{self.file.encoding!r} is an unknown encoding; name utf-8, utf-16 or latin-1 under [files]."
            ) from None

    def _decoded(self, block: bytes) -> bytes:
        try:
            # Also of UTF-8, of which Arrow's readers check nothing or only some columns.
            text = self._decoder.decode(block, final=not block)
        except UnicodeError as error:
            others = " or ".join(f'encoding = "{name}"' for name in ENCODINGS if name != self.file.encoding)
            raise UserError(
                f"{self.file} is not text in {self.file.encoding} ({getattr(error, 'reason', error)}); write "
                f"{others} under [files] of schema.toml."
            ) from None
        if "\0" in text:
            raise UserError(
                f"{self.file} holds zero bytes, as a damaged file does, or one in UTF-16 without a mark, for "
                'which encoding = "utf-16" under [files] helps.'
            )
        return text.encode()
