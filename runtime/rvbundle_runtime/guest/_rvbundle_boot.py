"""Runs at the start of every Python process of a payload (from a .pth file): the import finder.

A payload holds the bytecode of the modules that are hot, as `foo.pyc` where `foo.py` would lie. This
finder makes them look as in an ordinary environment (`__file__` names the source), answers for modules
that are cold in the place in sys.path where they would be, and restores what is asked for through the
pager. What is cold is listed in lib/rvbundle/cold.txt:

    D <folder, relative to the payload's root>
    p <name>                       a package: <name>/__init__.pyc
    s <name>                       a module: <name>.pyc
    y <name>                       a module that could not be compiled: <name>.py
    x <name> <file> [<library> …]  an extension module, and the cold shared libraries that it needs
    n <name>                       a package without __init__ of which nothing is hot
    d <file>                       a data file

Python's -S leaves all this out: hot modules then load by Python's own means, cold ones are not found.
"""

import _frozen_importlib as _importlib
import _frozen_importlib_external as _external
import _imp
import _io
import marshal
import os
import sys

_PREFIX = sys.base_prefix  # <root>/usr
_ROOT = os.path.dirname(_PREFIX)  # "/" in the sandbox
_BASE = _ROOT if _ROOT.endswith("/") else _ROOT + "/"
_SOCKET = "/run/rvbundle/pager"
_TORCH = "RVBUNDLE_TORCH"  # settings of torch: NAME=VALUE;... with names below `torch`
_WAYS_OUT = (
    "keep it in the image with [keep] in the recipe or with a [[trace]] that uses it, "
    "or put the cold pack (.cold.rvb) beside the image"
)

_told: "set[str]" = set()  # what stderr was told of: once per process


class _Absent(Exception):
    """Something cold can't be restored; the text says why."""


def _restore(path):
    """Bring `path` (absolute) back from the cold pack; raises _Absent."""
    import _socket  # not `socket`: what restores modules must not need one that may be cold

    address = os.environ.get("RVBUNDLE_PAGER", _SOCKET)
    if not path.startswith(_BASE):
        raise _Absent("it is outside the image")
    request = path[len(_BASE) :].encode()
    try:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(len(request).to_bytes(4, "little") + request)
            head = _receive(connection, 5)
            text = _receive(connection, int.from_bytes(head[1:], "little")).decode()
        finally:
            connection.close()
    except FileNotFoundError:
        raise _Absent("no trace used it, and the cold pack is not here") from None
    except OSError as error:
        raise _Absent("the pager does not answer: %s" % error) from None
    if head[0]:
        raise _Absent(text)


def _receive(connection, size):
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data


def _denied(fullname, path, reason):
    """Return the ImportError for a module that was left out; tell stderr too, lest it be swallowed."""
    text = "%s was left out of this image (%s): %s" % (fullname, reason, _WAYS_OUT)
    _tell(fullname, text)
    return ImportError(text, name=fullname, path=path)


def _tell(what, text):
    if what not in _told and sys.stderr is not None:
        _told.add(what)
        print("rvbundle: " + text, file=sys.stderr)


def _read_if_there(path):
    try:
        with _io.open_code(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


class PayloadLoader(_external.SourceFileLoader):
    """Loads `foo.pyc` under the name of `foo.py`; restores both from the cold pack when asked for."""

    def get_code(self, fullname):
        bytecode = self.path + "c"
        data = _read_if_there(bytecode)
        if data is None:
            try:
                _restore(bytecode)
            except _Absent as error:
                raise _denied(fullname, self.path, error) from None
            data = _external.FileLoader.get_data(self, bytecode)
        if data[:4] != _external.MAGIC_NUMBER:
            raise ImportError("%s was compiled for another Python" % bytecode, name=fullname, path=bytecode)
        code = marshal.loads(memoryview(data)[16:])
        if code.co_filename != self.path:
            _imp._fix_co_filename(code, self.path)  # type: ignore[attr-defined]
        return code

    def get_data(self, path):
        path = os.fspath(path)
        if not os.path.lexists(path):
            try:
                _restore(path)
            except _Absent as error:
                raise FileNotFoundError(2, "No such file in this image (%s)" % error, path) from None
        return _external.FileLoader.get_data(self, path)

    def get_resource_reader(self, name):  # type: ignore[override]  # noqa: ARG002
        from importlib.readers import FileReader

        reader = FileReader(self)
        place = reader.path
        reader.files = lambda: _cold_path(place)  # type: ignore[method-assign]
        return reader


class MetadataLoader(PayloadLoader):
    """Loads importlib.metadata. A loader of its own, so that no other import shows a frame of ours."""

    def exec_module(self, module):
        super().exec_module(module)
        _restore_metadata(module)


class TorchLoader(PayloadLoader):
    """Loads torch, and gives it the settings of the backend that the launcher has chosen."""

    def exec_module(self, module):
        super().exec_module(module)
        for setting in os.environ.get(_TORCH, "").split(";"):
            name, equals, value = setting.partition("=")
            if equals:
                _set_below(module, name, {"True": True, "False": False}.get(value, value))


def _set_below(module, name, value):
    """Set `module`.`name`, if this version has it: a setting that does nothing must not look as if it did."""
    owner, _, last = name.rpartition(".")
    target = module
    try:
        for part in filter(None, owner.split(".")):
            target = getattr(target, part)
        getattr(target, last)
        setattr(target, last, value)
    except (AttributeError, RuntimeError) as error:
        _tell(name, "torch.%s can't be %s, it stays as it is: %s" % (name, value, error))


def _restore_metadata(module):
    """Let importlib.metadata find what of a distribution's metadata is cold (RECORD, licences)."""
    plain = module.PathDistribution.read_text

    def read_text(self, filename):
        text = plain(self, filename)
        folder, _, name = (str(self._path) + "/" + str(filename)).rpartition("/")
        if text is None and "d " + name in _cold_lines(folder):
            path = folder + "/" + name
            try:
                _restore(path)
            except _Absent as error:
                _tell(path, "%s was left out of this image (%s): %s" % (path, error, _WAYS_OUT))
            else:
                text = plain(self, filename)
        return text

    read_text.__doc__ = plain.__doc__
    module.PathDistribution.read_text = read_text


class PayloadExtensionLoader(_external.ExtensionFileLoader):
    """Loads an extension module, restoring it and the libraries that it needs if they are cold."""

    def create_module(self, spec):
        for path in (self.path, *_finder_for(os.path.dirname(self.path)).needs(spec.name)):
            if not os.path.lexists(path):
                try:
                    _restore(path)
                except _Absent as error:
                    raise _denied(spec.name, self.path, error) from None
        return super().create_module(spec)


class PayloadSourceLoader(_external.SourceFileLoader):
    """Loads a cold module that has no bytecode (its source could not be compiled at build time)."""

    def get_data(self, path):
        if path == self.path and not os.path.lexists(path):
            try:
                _restore(path)
            except _Absent as error:
                raise _denied(self.name, path, error) from None
        return super().get_data(path)


class PayloadFinder:
    """Finds modules in one folder of the payload: those that are hot, and those that are cold."""

    def __init__(self, path):
        if not (path + "/").startswith(_BASE + "usr/"):
            raise ImportError("only for the payload's own folders", path=path)
        self.path = path
        self._hot = _external.FileFinder(
            path,
            (PayloadExtensionLoader, _imp.extension_suffixes()),
            (_SourcelessMarker, [".pyc"]),
            (_external.SourceFileLoader, [".py"]),
        )
        self._cold = None

    def cold(self):
        """Return {name: words of its line} for this folder's cold modules."""
        if self._cold is None:
            self._cold = {}
            for line in _cold_lines(self.path):
                words = line.split(" ")
                if words[0] != "d":
                    self._cold[words[1]] = words
        return self._cold

    def needs(self, fullname):
        """Return the paths of the cold libraries that an extension module of this folder needs."""
        words = self.cold().get(fullname.rpartition(".")[2], ())
        return [_BASE + library for library in words[3:]]

    def find_spec(self, fullname, target=None):
        tail = fullname.rpartition(".")[2]
        words = self.cold().get(tail)
        if words is not None:
            return self._cold_spec(fullname, words)
        spec = self._hot.find_spec(fullname, target)
        if spec is not None and isinstance(spec.loader, _SourcelessMarker):
            return _spec(fullname, spec.loader.path[:-1], spec.submodule_search_locations)
        return spec

    def _cold_spec(self, fullname, words):
        kind, name = words[0], words[1]
        place = self.path + "/" + name
        if kind == "n":
            spec = _importlib.ModuleSpec(fullname, None)  # as FileFinder answers for a mere folder
            spec.submodule_search_locations = [place]
            return spec
        if kind == "p":
            return _spec(fullname, place + "/__init__.py", [place])
        if kind == "s":
            return _spec(fullname, place + ".py", None)
        if kind == "y":
            source = PayloadSourceLoader(fullname, place + ".py")
            return _external.spec_from_file_location(fullname, source.path, loader=source)
        extension = PayloadExtensionLoader(fullname, self.path + "/" + words[2])
        return _external.spec_from_file_location(fullname, extension.path, loader=extension)

    def iter_modules(self, prefix=""):
        """Yield (name, is it a package) as pkgutil.iter_modules wants it."""
        import pkgutil

        found = dict(pkgutil.iter_importer_modules(self._hot, prefix))  # type: ignore[attr-defined]
        for name, words in self.cold().items():
            if words[0] != "n":  # which pkgutil does not list elsewhere either
                found[prefix + name] = words[0] == "p"
        return iter(sorted(found.items()))

    def invalidate_caches(self):
        self._hot.invalidate_caches()


class _SourcelessMarker(_external.SourcelessFileLoader):
    """What FileFinder found as .pyc; PayloadFinder gives it its real loader."""


def _spec(fullname, source, locations):
    loader = _LOADERS.get(fullname, PayloadLoader)(fullname, source)
    spec = _importlib.ModuleSpec(fullname, loader, origin=source)
    spec.submodule_search_locations = locations
    spec.has_location = True
    spec.cached = _external.cache_from_source(source)
    return spec


_LOADERS = {"importlib.metadata": MetadataLoader, "torch": TorchLoader}

_sections: "dict[str, str] | None" = None


def _cold_lines(folder):
    """Return the lines of cold.txt for `folder` (absolute)."""
    global _sections
    if _sections is None:
        _sections = {}
        try:
            with open(_PREFIX + "/lib/rvbundle/cold.txt", encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            text = ""  # nothing is cold: a plain tree
        for section in ("\n" + text).split("\nD ")[1:]:
            name, _, lines = section.partition("\n")
            _sections[_BASE + name] = lines
    return [line for line in _sections.get(folder, "").split("\n") if line]


def _finder_for(folder):
    finder = sys.path_importer_cache.get(folder)
    return finder if isinstance(finder, PayloadFinder) else PayloadFinder(folder)


_cold_path_class = None


def _cold_path(place):
    """Return `place` as a pathlib path whose cold files come back when they are used."""
    global _cold_path_class
    if _cold_path_class is None:
        import pathlib

        class ColdPath(type(pathlib.Path())):  # type: ignore[misc]
            """A path that restores itself before the operating system sees it."""

            __slots__ = ()

            def __fspath__(self):
                text = str(self)
                if not os.path.lexists(text):
                    try:
                        _restore(text)
                    except _Absent:
                        return text  # then it does not exist, as everywhere else
                return text

            def iterdir(self):
                folder = str(self)
                names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
                for line in _cold_lines(folder):
                    if line.startswith("d "):
                        names.add(line[2:])
                return iter([self / name for name in sorted(names)])

        _cold_path_class = ColdPath
    return _cold_path_class(place)


def _install():
    sys.path_hooks.insert(0, PayloadFinder)
    for path in list(sys.path_importer_cache):
        if (path + "/").startswith(_BASE + "usr/"):
            del sys.path_importer_cache[path]
    # What was imported before this module looks like its bytecode, or is frozen without a source.
    if "importlib.metadata" in sys.modules:
        _restore_metadata(sys.modules["importlib.metadata"])
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None) or ""
        if spec is None or not file.startswith(_BASE + "usr/lib/python"):
            continue
        if file.endswith(".pyc"):
            file = file[:-1]
        if file.endswith(".py"):
            module.__file__ = file
            module.__loader__ = spec.loader = PayloadLoader(name, file)
            if spec.origin != "frozen":
                spec.origin = file
                cached = _external.cache_from_source(file)
                spec.cached = module.__cached__ = cached  # type: ignore[attr-defined]


_install()
