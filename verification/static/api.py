"""The public API of immwire-core as text, one item a line, from what rustdoc makes of the source.

`api.txt` is the listing that users may rely on. `check` compares: a line that is gone or changed breaks somebody, and
needs a new minor version before 1.0; a line that is new does not. Either way the listing must be updated
(`verification/static/check --write-api`), so that no change of the API goes unseen in a review.

Left out: auto traits, blanket implementations, documentation.
"""

import json
import os
import re

from toolchain import ROOT, Missing, call

LISTING = ROOT / "verification" / "static" / "api.txt"
FORMATS = (57,)  # What this file was written for; rustdoc changes it now and then.
UNSEEN = ("StructuralPartialEq",)  # The compiler's own.


class Printer:
    """Prints items of one rustdoc file."""

    def __init__(self, document):
        self.index = document["index"]

    def args(self, args):
        if not args:
            return ""
        kind, inner = next(iter(args.items())) if isinstance(args, dict) else ("", args)
        if kind == "parenthesized":
            out = f" -> {self.type(inner['output'])}" if inner["output"] else ""
            return "(" + ", ".join(map(self.type, inner["inputs"])) + ")" + out
        if kind != "angle_bracketed":
            return ""
        parts = []
        for arg in inner["args"]:
            if arg == "infer":
                parts.append("_")
            elif "lifetime" in arg:
                parts.append(arg["lifetime"])
            elif "type" in arg:
                parts.append(self.type(arg["type"]))
            else:
                parts.append(arg["const"].get("value") or arg["const"]["expr"])
        for one in inner["constraints"]:
            what = one["binding"]
            right = (" = " + self.term(what["equality"])) if "equality" in what else ": " + self.bounds(what["constraint"])
            parts.append(one["name"] + right)
        return "<" + ", ".join(parts) + ">" if parts else ""

    def term(self, term):
        return self.type(term["type"]) if "type" in term else term["constant"]["expr"]

    def path(self, path):
        return path["path"].split("::")[-1] + self.args(path["args"])

    def bounds(self, bounds):
        said = []
        for bound in bounds:
            if "trait_bound" in bound:
                sign = {"none": "", "maybe": "?", "maybe_const": "~const "}[bound["trait_bound"]["modifier"]]
                said.append(sign + self.path(bound["trait_bound"]["trait"]))
            elif "outlives" in bound:
                said.append(bound["outlives"])
            else:
                said.append("use<..>")
        return " + ".join(said)

    def type(self, node):
        if node is None:
            return "_"
        kind, inner = next(iter(node.items()))
        if kind in ("primitive", "generic"):
            return inner
        if kind == "resolved_path":
            return self.path(inner)
        if kind == "borrowed_ref":
            life = f"{inner['lifetime']} " if inner["lifetime"] else ""
            return f"&{life}{'mut ' if inner['is_mutable'] else ''}{self.type(inner['type'])}"
        if kind == "raw_pointer":
            return f"*{'mut' if inner['is_mutable'] else 'const'} {self.type(inner['type'])}"
        if kind == "slice":
            return f"[{self.type(inner)}]"
        if kind == "array":
            return f"[{self.type(inner['type'])}; {inner['len']}]"
        if kind == "tuple":
            return "(" + ", ".join(map(self.type, inner)) + ")"
        if kind == "impl_trait":
            return "impl " + self.bounds(inner)
        if kind == "dyn_trait":
            return "dyn " + " + ".join(self.path(each["trait"]) for each in inner["traits"])
        if kind == "qualified_path":
            of = f"<{self.type(inner['self_type'])} as {self.path(inner['trait'])}>" if inner["trait"] else self.type(inner["self_type"])
            return f"{of}::{inner['name']}"
        if kind == "function_pointer":
            return "fn" + self.signature(inner["sig"])
        raise Missing(f"rustdoc has a kind of type that is not known here: {kind}")

    def signature(self, sig):
        inputs = []
        for name, node in sig["inputs"]:
            said = self.type(node)
            if name == "self":
                inputs.append({"Self": "self", "&Self": "&self", "&mut Self": "&mut self"}.get(said, f"self: {said}"))
            else:
                inputs.append(f"{name}: {said}")
        out = f" -> {self.type(sig['output'])}" if sig["output"] else ""
        return f"({', '.join(inputs)}){out}"

    def generics(self, generics):
        params, where = [], []
        for param in generics["params"]:
            kind, inner = next(iter(param["kind"].items()))
            if kind == "const":
                params.append(f"const {param['name']}: {self.type(inner['type'])}")
            elif kind == "lifetime":
                params.append(param["name"])
            elif not inner.get("is_synthetic"):
                bounds, default = self.bounds(inner["bounds"]), inner["default"]
                params.append(param["name"] + (f": {bounds}" if bounds else "") + (f" = {self.type(default)}" if default else ""))
        for clause in generics["where_predicates"]:
            kind, inner = next(iter(clause.items()))
            if kind == "bound_predicate":
                where.append(f"{self.type(inner['type'])}: {self.bounds(inner['bounds'])}")
            elif kind == "lifetime_predicate":
                where.append(f"{inner['lifetime']}: {' + '.join(inner['outlives'])}")
            else:
                where.append(f"{self.type(inner['lhs'])} = {self.term(inner['rhs'])}")
        return ("<" + ", ".join(params) + ">" if params else ""), (" where " + ", ".join(where) if where else "")

    def function(self, item, of=""):
        inner, header = item["inner"]["function"], item["inner"]["function"]["header"]
        params, where = self.generics(inner["generics"])
        words = ("const " if header["is_const"] else "") + ("async " if header["is_async"] else "")
        words += "unsafe " if header["is_unsafe"] else ""
        return f"{words}fn {of}{item['name']}{params}{self.signature(inner['sig'])}{where}"

    def fields(self, path, ids):
        for number in ids:
            field = self.index.get(str(number))
            if field is not None and field["visibility"] in ("public", "default"):
                yield f"field {path}.{field['name']}: {self.type(field['inner']['struct_field'])}"

    def attributes(self, item):
        return " #[non_exhaustive]" if "non_exhaustive" in str(item.get("attrs")) else ""

    def implementations(self, path, ids):
        derived = []
        for number in ids:
            item = self.index.get(str(number))
            if item is None or item["inner"]["impl"]["is_synthetic"] or item["inner"]["impl"]["blanket_impl"]:
                continue
            inner = item["inner"]["impl"]
            if inner["trait"]:
                if inner["trait"]["path"].split("::")[-1] not in UNSEEN:
                    derived.append(self.path(inner["trait"]))
                continue
            params, where = self.generics(inner["generics"])
            members = [self.index[str(each)] for each in inner["items"]]
            members = [member for member in members if member["visibility"] == "public"]
            if members and (params or where):
                yield f"impl{params} {self.type(inner['for'])}{where}"
            for member in members:
                yield from self.member(member, f"{path}::")
        if derived:
            yield f"impl {path}: {', '.join(sorted(set(derived)))}"

    def member(self, item, scope):
        kind = next(iter(item["inner"]))
        inner = item["inner"][kind]
        if kind == "function":
            yield self.function(item, scope)
        elif kind == "assoc_const":
            yield f"const {scope}{item['name']}: {self.type(inner['type'])} = {inner['value']}"
        elif kind == "assoc_type":
            yield f"type {scope}{item['name']}: {self.bounds(inner['bounds'])}"

    def item(self, item, path):
        kind = next(iter(item["inner"]))
        inner = item["inner"][kind]
        name = f"{path}::{item['name']}" if path else item["name"]
        if kind == "module":
            yield f"mod {name}"
            for number in inner["items"]:
                child = self.index.get(str(number))
                if child is not None and child["visibility"] == "public":
                    yield from self.item(child, name)
        elif kind == "function":
            yield self.function(item, path + "::")
        elif kind == "struct":
            params, where = self.generics(inner["generics"])
            yield f"struct {name}{params}{where}{self.attributes(item)}"
            shape = inner["kind"]
            if isinstance(shape, dict) and "plain" in shape:
                yield from self.fields(name, shape["plain"]["fields"])
            elif isinstance(shape, dict) and "tuple" in shape:
                yield from self.fields(name, [number for number in shape["tuple"] if number is not None])
            yield from self.implementations(name, inner["impls"])
        elif kind == "enum":
            params, where = self.generics(inner["generics"])
            yield f"enum {name}{params}{where}{self.attributes(item)}"
            for number in inner["variants"]:
                variant = self.index[str(number)]
                yield f"variant {name}::{variant['name']}"
                shape = variant["inner"]["variant"]["kind"]
                if isinstance(shape, dict):
                    found = shape["struct"]["fields"] if "struct" in shape else [n for n in shape["tuple"] if n is not None]
                    yield from self.fields(f"{name}::{variant['name']}", found)
            yield from self.implementations(name, inner["impls"])
        elif kind == "trait":
            params, where = self.generics(inner["generics"])
            bounds = self.bounds(inner["bounds"])
            yield f"{'unsafe ' if inner['is_unsafe'] else ''}trait {name}{params}{': ' + bounds if bounds else ''}{where}"
            for number in inner["items"]:
                yield from self.member(self.index[str(number)], f"{name}::")
        elif kind == "constant":
            yield f"const {name}: {self.type(inner['type'])} = {inner['const']['expr']}"
        elif kind == "type_alias":
            yield f"type {name}{self.generics(inner['generics'])[0]} = {self.type(inner['type'])}"
        elif kind == "use":
            target = self.index.get(str(inner["id"]))
            if target is None or inner["is_glob"]:
                yield f"use {inner['source']} as {path}::{inner['name']}{'::*' if inner['is_glob'] else ''}"
            else:
                yield from self.item({**target, "name": inner["name"]}, path)
        elif kind == "macro":
            yield f"macro {name}"
        else:
            raise Missing(f"rustdoc has a kind of item that is not known here: {kind}")


def listing():
    """The API as it is now: sorted lines. `Missing` if this rustdoc speaks another format."""
    clean = {k: v for k, v in os.environ.items() if "RUSTFLAGS" not in k and "RUSTDOCFLAGS" not in k}
    target = ROOT / "target" / "api"
    done = call(["cargo", "rustdoc", "--quiet", "--locked", "-p", "immwire-core", "--lib", "--target-dir", target,
                 "--", "-Zunstable-options", "--output-format", "json"], cwd=ROOT,
                env=clean | {"RUSTC_BOOTSTRAP": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"rustdoc fails:\n{done.stderr}")
    document = json.loads((target / "doc" / "immwire_core.json").read_text())
    if document["format_version"] not in FORMATS:
        raise Missing(f"rustdoc speaks format {document['format_version']}, this check {FORMATS}")
    printer = Printer(document)
    return sorted(set(printer.item(document["index"][str(document["root"])], "")))


def header(manifest):
    found = re.search(r'^version = "([^"]+)"', manifest, re.M)
    return f"# The public API of immwire-core {found[1]}; see api.py."


def compare(old, new):
    """(lines gone, lines new)."""
    return sorted(set(old) - set(new)), sorted(set(new) - set(old))


def versions_break(old, new):
    """Whether going from version `old` to `new` tells users that something may break."""
    numbers = lambda version: [int(part) for part in version.split(".")]
    a, b = numbers(old), numbers(new)
    lead = next((at for at, part in enumerate(a) if part), len(a) - 1)
    return b[: lead + 1] > a[: lead + 1]
