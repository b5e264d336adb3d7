"""What our Triton and Gluon kernels load and store, and whether a barrier lies between, read off their source."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Value = frozenset[str] | tuple["Value", ...]  # the kernel's parameters that something points into; of a tuple, of each
NOTHING: Value = frozenset()
BARRIERS = {"debug_barrier", "barrier", "thread_barrier"}
MODULES = {"tl", "gl", "tma", "async_copy"}  # what kernels call Triton's own


class Source(NamedTuple):
    functions: dict[str, ast.FunctionDef]  # a module's, for the device
    imports: dict[str, tuple[str, str]]  # module and name, by the name here


class Kernel(NamedTuple):
    conflicts: set[tuple[str, str]]  # parameter, and the loop that leads from one access to the other, or nothing
    in_place: set[str]  # parameters that are loaded and stored
    unknown: list[str]  # accesses whose address comes from no parameter


def read(texts: dict[str, str]) -> dict[str, Source]:
    """Modules' sources, by dotted names."""
    found = {}
    for module, text in texts.items():
        body = ast.parse(text).body
        functions = {each.name: each for each in body if isinstance(each, ast.FunctionDef) and _is_jit(each)}
        froms = [each for each in body if isinstance(each, ast.ImportFrom) and each.module]
        imports = {each.asname or each.name: (line.module or "", each.name) for line in froms for each in line.names}
        found[module] = Source(functions, imports)
    return found


def walk_all(sources: dict[str, Source]) -> dict[str, Kernel]:
    """Each kernel that no other calls, by its name."""
    functions = {(module, name): node for module in sources for name, node in sources[module].functions.items()}
    called = {
        sources[module].imports.get(node.id, (module, node.id))
        for (module, _), function in functions.items()
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
    return {at[1]: Walk(sources).kernel(at) for at in functions if at not in called}


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).partition("(")[0].endswith(".jit") for each in function.decorator_list)


def _flat(value: Value) -> frozenset[str]:
    return value if isinstance(value, frozenset) else frozenset().union(*map(_flat, value))


def _either(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_either, one, other))
    return _flat(one) | _flat(other)


@dataclass
class Walk:
    """A way through one kernel: calls are followed, both sides of a branch taken, a loop's body gone through twice."""

    sources: dict[str, Source]
    module: str = ""
    names: dict[str, Value] = field(default_factory=dict)  # of the function that is gone through
    returned: list[Value] = field(default_factory=list)
    pending: set[tuple[str, str]] = field(default_factory=set)  # accesses, and to what, since the last barrier
    all: set[tuple[str, str]] = field(default_factory=set)
    again: list[str] = field(default_factory=list)  # loops that are gone through for the second time
    conflicts: set[tuple[str, str]] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)

    def kernel(self, at: tuple[str, str]) -> Kernel:
        arguments = self.sources[at[0]].functions[at[1]].args.args  # constants are annotated
        self._enter(at, [NOTHING if each.annotation else frozenset({each.arg}) for each in arguments], {})
        loaded, stored = ({at for access, at in self.all if (access == "store") is way} for way in (False, True))
        return Kernel(self.conflicts, loaded & stored, self.unknown)

    def _enter(self, at: tuple[str, str], given: list[Value], named: dict[str, Value]) -> Value:
        caller = self.module, self.names, self.returned
        node = self.sources[at[0]].functions[at[1]]
        names = dict(zip((each.arg for each in node.args.args), given, strict=False)) | named
        self.module, self.names, self.returned = at[0], names, []
        self._run(node.body)
        first, *others = self.returned or [NOTHING]
        for each in others:
            first = _either(first, each)
        self.module, self.names, self.returned = caller
        return first

    def _access(self, access: str, value: Value, releases: bool = False) -> None:
        """Atomic operations may meet; what is stored before one that releases is to be stored by every warp."""
        for pointer in _flat(value):
            met = {at for earlier, at in self.pending if at == pointer and earlier != access}
            met |= {at for earlier, at in self.pending if releases and earlier == "store"}
            loop = self.again[-1] if self.again else ""
            self.conflicts |= {(at, loop) for at in met if (at, "") not in self.conflicts}
            self.pending.add((access, pointer))
            self.all.add((access, pointer))

    def _run(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.If():
                    self._value(node.test)
                    self._run_either(node.body, node.orelse)
                case ast.For() | ast.While():
                    for loops in ([], [ast.unparse(node).partition(":\n")[0]]):
                        self.again += loops
                        self._value(node.iter if isinstance(node, ast.For) else node.test)
                        self._run_either(node.body, [])
                    self.again.pop()
                case ast.Assign(targets=targets, value=value):
                    self._bind(targets[0], self._value(value))
                case ast.Return(value=value) if value is not None:
                    self.returned.append(self._value(value))
                case _:  # what `+=` moves points where it did
                    self._values(node)

    def _run_either(self, *bodies: list[ast.stmt]) -> None:
        pending, names, ends = self.pending, self.names, []
        for body in bodies:
            self.pending, self.names = set(pending), dict(names)
            self._run(body)
            ends.append((self.pending, self.names))
        (one, names), (other, more) = ends
        self.pending = one | other
        self.names = names | {name: _either(value, names.get(name, value)) for name, value in more.items()}

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            fits = isinstance(value, tuple) and len(value) == len(target.elts)
            for each, item in zip(target.elts, value if fits else [_flat(value)] * len(target.elts), strict=True):
                self._bind(each, item)  # type: ignore[arg-type]

    def _values(self, node: ast.AST) -> list[Value]:
        return [self._value(each) for each in ast.iter_child_nodes(node)]

    def _value(self, node: Any) -> Value:
        match node:
            case ast.Name():
                return self.names.get(node.id, NOTHING)
            case ast.Tuple() | ast.List():
                return tuple(map(self._value, node.elts))
            case ast.BinOp():  # a pointer comes first, then what is added to it
                first, second = self._value(node.left), self._value(node.right)
                if isinstance(first, tuple) and isinstance(second, tuple):
                    return first + second
                return first if isinstance(node.op, ast.Add | ast.Sub) else NOTHING
            case ast.Subscript(slice=ast.Constant(value=int(nth))):
                held = self._value(node.value)
                return held[nth] if isinstance(held, tuple) and nth < len(held) else _flat(held)
            case ast.Attribute():
                self._values(node)
                return NOTHING
            case ast.Call():
                return self._call(node)
        return _flat(tuple(self._values(node)))

    def _call(self, node: ast.Call) -> Value:
        of, name = (node.func.value, node.func.attr) if isinstance(node.func, ast.Attribute) else (None, "")
        is_method = of is not None and ast.unparse(of) not in MODULES
        owner = NOTHING if of is None else self._value(of)
        given = [value for each in node.args for value in self._given(each)]
        named = {each.arg or "": self._value(each.value) for each in node.keywords}
        if function := self._function(node.func):
            return self._enter(function, given, named)
        if (name or ast.unparse(node.func)) in BARRIERS:
            self.pending.clear()
        elif name == "warp_specialize":  # side by side
            self._enter_each(node.args[0], given[0])
        elif name in {"load", "store", "async_copy_global_to_shared"} or name.startswith("atomic_"):
            at = owner if is_method else tuple(given) if name.startswith("async") else _flat(tuple(given[:1]))
            if not is_method and not _flat(at):
                self.unknown.append(ast.unparse(node))
            kind = "count" if name.startswith("atomic_") else "store" if name == "store" else "load"
            self._access(kind, at, kind == "count" and "sem='relaxed'" not in ast.unparse(node))
        elif isinstance(of, ast.Call) and "pointer_type" in ast.unparse(node):
            return self._value(of.args[0])  # a loaded address stands for what it points to
        else:
            return _flat((owner, *given))
        return NOTHING

    def _given(self, node: ast.expr) -> tuple[Value, ...]:
        """What an argument is, or those of a tuple that is unpacked."""
        value = self._value(node.value if isinstance(node, ast.Starred) else node)
        return value if isinstance(node, ast.Starred) and isinstance(value, tuple) else (value,)

    def _enter_each(self, parts: Any, given: Any) -> None:
        start, ends = self.pending, set()
        for part, (_, arguments) in zip(parts.elts, given, strict=True):
            self.pending = set(start)
            self._enter(self._function(part.elts[0]) or ("", ""), list(arguments), {})
            ends |= self.pending
        self.pending = ends

    def _function(self, node: ast.expr) -> tuple[str, str] | None:
        name = node.id if isinstance(node, ast.Name) else ""
        at = self.sources[self.module].imports.get(name, (self.module, name))
        return at if at[0] in self.sources and at[1] in self.sources[at[0]].functions else None
