"""`DiskPages`: writes, reads and deletes pages of the disk cache in threads, so that steps do not wait for the disk."""

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial

import numpy as np

from dsjax.background import WorkQueue, contained
from dsjax.engine.tiers.page_folder import Page, PageFileError, PageFiles, bytes_on_disk
from dsjax.engine.tiers.page_tiers import PageReports

LISTING_SECONDS = 10.0
"""Maximum time that loading waits for the list of pages. Listing then continues while serving; writes start when it is done."""
READERS = 4
"""Number of reader threads."""
END_SECONDS = 5.0
"""Maximum time that a shutdown waits for pending writes."""

_log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Global (unsharded) shape and dtype of a page's arrays, by name."""


class DiskPages:
    """The executor's access to the disk cache. The engine's thread calls all methods, which return at once unless documented otherwise.

    One thread writes and deletes, in the order of the calls; `READERS` other threads read. `reports` names a finished read by its rank and
    number, and a finished write by its number, also after failures; the log has the first failure of each kind.

    Args:
        files: page files of a locked folder, which `close` unlocks.
        max_bytes: limit for all pages in the folder. Pages of other models, dtypes or page sizes are evicted first, then in LRU order.
    """

    def __init__(self, files: PageFiles, max_bytes: int):
        self._files, self._max_bytes = files, max_bytes
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._read: list[tuple[int, int, bool]] = []  # (rank, number, success), until `reports`
        self._written: list[tuple[int, bool]] = []  # (number, success), until `reports`
        self._names: dict[bytes, int] | None = None  # the listing, until `reports`: name → room in context pages
        self._pages: dict[tuple[int, int], Page | None] = {}  # reads by (rank, number); None: being read
        self._others: list[tuple[float, str, int]] = []  # of other fingerprints: (last use, path, bytes)
        self._own_bytes = self._other_bytes = 0
        self._warned: set[str] = set()
        self._writer = WorkQueue("disk writer", "dsjax-page-writer", cost="A page is not written or not deleted.")
        self._readers = WorkQueue("disk reader", "dsjax-page-reader", threads=READERS)
        self._listed = threading.Event()
        self._writer.put(self._list)
        self._writer.start()
        self._readers.start()
        if not self._listed.wait(LISTING_SECONDS):
            _log.warning(
                f"--disk-cache: {files.folder.path} has so many pages that listing them takes more than {LISTING_SECONDS:.0f} s; it goes "
                "on while serving, and until it is done no page of it is found, and none is written."
            )

    def write(self, number: int, name: bytes, page: Page) -> None:
        """Write a page. The caller must not change it afterwards."""
        self._writer.put(partial(self._write, number, name, page))

    def drop(self, everything: bool, names: list[bytes]) -> None:
        """Delete all pages (`everything`) and the pages with these names, after all earlier writes."""
        self._writer.put(partial(self._delete, everything, names))

    def read(self, rank: int, number: int, name: bytes) -> None:
        """Read a page, and keep it until `take` or `forget`."""
        with self._lock:
            self._pages[rank, number] = None
        self._readers.put(partial(self._read_or_drop, rank, number, name))

    def take(self, rank: int, number: int) -> Page:
        """Return a page that was reported as read, and forget it."""
        with self._lock:
            return self._pages.pop((rank, number))

    def forget(self, rank: int, number: int) -> None:
        """Drop a page that was read, or is being read."""
        with self._lock:
            self._pages.pop((rank, number), None)

    def reports(self, seconds: float = 0.0) -> PageReports:
        """Return reads, writes and listings completed since the last call. If there are none, wait up to `seconds` for the first."""
        with self._lock:
            if seconds and self._names is None and not (self._read or self._written):
                self._reported.wait(seconds)
            reports = PageReports(self._read, self._written, self._names)
            self._read = []
            self._written = []
            self._names = None
        return reports

    def close(self) -> None:
        """End the threads. Waits up to `END_SECONDS` for pending writes."""
        self._readers.close()
        if not self._writer.close(END_SECONDS):
            _log.warning(
                "--disk-cache: some pages were not written in the %.0f s after the end; they are lost.", END_SECONDS
            )
        self._files.folder.close()

    # In the writer thread.

    def _list(self) -> None:
        names: dict[bytes, int] = {}  # least recently used first, with bytes on the disk
        with contained("disk writer", "No page of an earlier run is found."):
            began = time.monotonic()
            files = self._files
            try:
                names, self._others = files.list()
            except Exception as error:
                self._warn("list", "its pages cannot be listed (%s); none of an earlier run is found", error)
            else:
                self._own_bytes, self._other_bytes = sum(names.values()), sum(size for _, _, size in self._others)
                own_gb, other_gb = self._own_bytes / 1e9, self._other_bytes / 1e9
                _log.info(
                    f"--disk-cache: {files.folder.path} has {len(names)} pages of this model, {own_gb:.2f} GB, and {other_gb:.2f} GB "
                    f"of others; listed in {time.monotonic() - began:.2f} s"
                )
            excess = []  # least recently used pages beyond the limit
            kept_bytes = self._own_bytes
            for name, size in names.items():
                if kept_bytes > self._max_bytes:
                    excess.append(name)
                    kept_bytes -= size
            self._delete(everything=False, names=excess)
            for name in excess:
                del names[name]
            names = {name: -(-size // files.page_bytes) for name, size in names.items()}  # bytes to context pages
            self._make_room(0)
        with self._reported:
            self._names = names
            self._reported.notify()
        self._listed.set()

    def _make_room(self, num_bytes: int) -> None:
        """Delete pages of other models until `num_bytes` fit. The scheduler decides when to drop this model's own pages."""
        while self._others and self._own_bytes + num_bytes + self._other_bytes > self._max_bytes:
            _, path, size = self._others.pop(0)
            self._other_bytes -= size
            try:
                self._files.folder.delete(path)
            except OSError as error:
                self._warn(
                    "delete", "a page cannot be deleted (%s); the folder may grow beyond --disk-cache-bytes", error
                )

    def _write(self, number: int, name: bytes, page: Page) -> None:
        try:
            self._make_room(bytes_on_disk(sum(array.nbytes for array in page.values())))
            self._own_bytes += self._files.write(name, page)
            is_written = True
        except Exception as error:  # of any kind: the scheduler waits for a report, and serving goes on
            self._warn("write", "a page cannot be written (%s); it is tried again later", error)
            is_written = False
        with self._reported:
            self._written.append((number, is_written))
            self._reported.notify()

    def _delete(self, everything: bool, names: list[bytes]) -> None:
        try:
            if everything:
                self._files.delete_all()
                self._own_bytes = 0
            for name in names:
                self._own_bytes -= self._files.delete(name)
        except Exception as error:
            self._warn("delete", "a page cannot be deleted (%s); the folder may grow beyond --disk-cache-bytes", error)

    # In a reader thread.

    def _read_or_drop(self, rank: int, number: int, name: bytes) -> None:
        with self._lock:
            if (rank, number) not in self._pages:  # forgotten meanwhile
                return
        page = self._read_page(name)
        with self._reported:
            if (rank, number) in self._pages:
                self._pages[rank, number] = page
                if page is None:
                    del self._pages[rank, number]
                self._read.append((rank, number, page is not None))
                self._reported.notify()

    def _read_page(self, name: bytes) -> Page | None:
        try:
            return self._files.read(name)
        except PageFileError as error:
            self._warn("damage", "%s; it is deleted, and its tokens are computed again", error)
        except FileNotFoundError:  # evicted since it was requested
            pass
        except Exception as error:
            self._warn("read", "a page cannot be read (%s); its tokens are computed again", error)
        return None

    def _warn(self, kind: str, message: str, error: Exception) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        reason = getattr(error, "strerror", None) or error
        _log.warning("--disk-cache: " + message + ". Serving goes on; this is said once.", reason)
