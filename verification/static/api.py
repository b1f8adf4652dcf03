"""The public API of immwire-core as text, one item a line, from what rustdoc makes of the source.

`api.txt` is the listing that users may rely on. `check` compares: a line that is gone or changed breaks somebody, and
needs a new minor version before 1.0; a line that is new does not, but for what users had to name in full: variants of an
enum and fields of a struct that are not `#[non_exhaustive]`, and what whoever implements a trait must have. Either way the
listing must be updated (`verification/static/check --write-api`), so that no change of the API goes unseen in a review.

A struct or variant that users cannot name in full, since some of its fields are private, ends in `{ .. }`. So does what a trait
provides by itself; what it requires ends in `;`.

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

    def stripped(self, item, shape):
        """What stands for fields that are not shown. Users cannot tell of what is not exhaustive anyhow."""
        found = False
        if isinstance(shape, dict):
            tuple_, other = shape.get("tuple"), shape.get("plain", shape.get("struct"))
            found = None in tuple_ if tuple_ is not None else other["has_stripped_fields"]
        return " { .. }" if found and not self.attributes(item) else ""

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

    def member(self, item, scope, of_trait=False):
        kind = next(iter(item["inner"]))
        inner = item["inner"][kind]
        if kind == "function":
            end = (" { .. }" if inner["has_body"] else ";") if of_trait else ""
            yield self.function(item, scope) + end
        elif kind == "assoc_const":
            value = ";" if of_trait and inner["value"] is None else f" = {inner['value']}"
            yield f"const {scope}{item['name']}: {self.type(inner['type'])}{value}"
        elif kind == "assoc_type":
            default = f" = {self.type(inner['type'])}" if inner["type"] else ";" if of_trait else ""
            yield f"type {scope}{item['name']}: {self.bounds(inner['bounds'])}{default}"

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
            shape = inner["kind"]
            yield f"struct {name}{params}{where}{self.attributes(item)}{self.stripped(item, shape)}"
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
                shape = variant["inner"]["variant"]["kind"]
                yield f"variant {name}::{variant['name']}{self.attributes(variant)}{self.stripped(variant, shape)}"
                if isinstance(shape, dict):
                    found = shape["struct"]["fields"] if "struct" in shape else [n for n in shape["tuple"] if n is not None]
                    yield from self.fields(f"{name}::{variant['name']}", found)
            yield from self.implementations(name, inner["impls"])
        elif kind == "trait":
            params, where = self.generics(inner["generics"])
            bounds = self.bounds(inner["bounds"])
            yield f"{'unsafe ' if inner['is_unsafe'] else ''}trait {name}{params}{': ' + bounds if bounds else ''}{where}"
            for number in inner["items"]:
                yield from self.member(self.index[str(number)], f"{name}::", of_trait=True)
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


NAMED = re.compile(r"(?:unsafe )?(enum|struct|variant|trait) ([\w:]+)")
MEMBER = re.compile(r"(?:(?:const|async|unsafe) )*(?:fn|const|type) ([\w:]+)::\w+")


def owners(listing):
    """Items whose users name all that they have: (kind, path)."""
    named = ((line, NAMED.match(line)) for line in listing)
    return {found.groups() for line, found in named if found and not line.endswith((" #[non_exhaustive]", " { .. }"))}


def owner(line):
    """(kinds, path): of what a new line like this is a part that its users had to know; `None` if they did not have to."""
    if line.startswith("variant "):
        return ("enum",), NAMED.match(line)[2].rpartition("::")[0]
    if line.startswith("field "):
        return ("struct", "variant"), line.removeprefix("field ").partition(".")[0]
    if line.endswith(";") and (found := MEMBER.match(line)):
        return ("trait",), found[1]
    return None


def breaking(old, new):
    """The lines by whose going or coming something of users' breaks."""
    gone, come = compare(old, new)
    complete = owners(old)
    of = ((line, owner(line)) for line in come)
    return gone + [line for line, found in of if found and any((kind, found[1]) in complete for kind in found[0])]


def samples():
    """(what, a listing, what it becomes, whether that breaks users)."""
    generics = {"params": [], "where_predicates": []}

    def struct(*, fields, stripped, attrs=()):
        shape = {"plain": {"fields": fields, "has_stripped_fields": stripped}}
        return {"name": "S", "attrs": list(attrs), "inner": {"struct": {"generics": generics, "kind": shape, "impls": []}}}

    def tuple_struct(fields):
        return {"name": "S", "attrs": [], "inner": {"struct": {"generics": generics, "kind": {"tuple": fields}, "impls": []}}}

    def trait(*, has_body):
        header = {"is_const": False, "is_async": False, "is_unsafe": False}
        method = {"generics": generics, "header": header, "sig": {"inputs": [], "output": None}, "has_body": has_body}
        inner = {"generics": generics, "bounds": [], "is_unsafe": False, "items": [1] if has_body is not None else []}
        return {"name": "T", "attrs": [], "inner": {"trait": inner}}, {"1": {"name": "f", "inner": {"function": method}}}

    def printed(item, index=()):
        return list(Printer({"index": dict(index)}).item(item, "c"))

    field = {"0": {"name": "a", "visibility": "public", "inner": {"struct_field": {"primitive": "u8"}}}}
    whole, partly = struct(fields=[0], stripped=False), struct(fields=[0], stripped=True)
    grows = ["#[non_exhaustive]"]
    enum, open_enum = ["enum c::E", "variant c::E::A"], ["enum c::E #[non_exhaustive]", "variant c::E::A"]
    none, provided, required = (printed(*trait(has_body=has_body)) for has_body in (None, True, False))
    return [
        ("a private field", printed(whole, field), printed(partly, field), True),
        ("a private field where there are some", printed(partly, field), printed(partly, field), False),
        ("a private field of a tuple", printed(tuple_struct([0]), field), printed(tuple_struct([0, None]), field), True),
        ("a private field of what may grow", printed(struct(fields=[0], stripped=False, attrs=grows), field),
         printed(struct(fields=[0], stripped=True, attrs=grows), field), False),
        ("a public field", printed(struct(fields=[], stripped=False)), printed(whole, field), True),
        ("a public field beside private ones", printed(struct(fields=[], stripped=True)), printed(partly, field), False),
        ("a field of a variant", enum, [*enum, "field c::E::A.x: u8"], True),
        ("a variant", enum, [*enum, "variant c::E::B"], True),
        ("a variant of what may grow", open_enum, [*open_enum, "variant c::E::B"], False),
        ("an enum, and its variants", [], enum, False),
        ("a default body that is taken", provided, required, True),
        ("a method that is required", none, required, True),
        ("a method that is provided", none, provided, False),
        ("a type that is required", none, [*none, "type c::T::X: Copy;"], True),
        ("a trait, and what it requires", [], required, False),
        ("a function", enum, [*enum, "fn c::f()"], False),
        ("no function", [*enum, "fn c::f()"], enum, True),
    ]


def versions_break(old, new):
    """Whether going from version `old` to `new` tells users that something may break."""
    numbers = lambda version: [int(part) for part in version.split(".")]
    a, b = numbers(old), numbers(new)
    lead = next((at for at, part in enumerate(a) if part), len(a) - 1)
    return b[: lead + 1] > a[: lead + 1]
