//! The crate's structures, signatures and constants are those of the installed libibverbs's headers.
//!
//! A C compiler judges: each field's offset, size and type, each structure's size, each symbol's prototype and each
//! constant becomes a `_Static_assert`, made from the crate's own listings. That every one of the assertions can fail is
//! shown too. Parameters of one type can change places without a compiler's noticing: where there are two of one type in
//! a row, `tests` of the platform crate that call the function are what shows it.
//!
//! Without headers or compiler this fails, unless `IMMWIRE_WITHOUT_HEADERS=1` says that it is meant.

// Helpers outside of `#[test]` functions may do what those may.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use ibverbs_sys::{CONSTANTS, ENUMS, Field, PLACES, Part, STRUCTS, SYMBOLS, Struct};

const INCLUDES: &str = "#include <stddef.h>\n#include <infiniband/verbs.h>\n";

/// Their C types are not said here: unions, structures without a name, and tables of old. Size and offset must do.
const UNTYPED: [(&str, &str); 66] = [
    ("ibv_device", "_ops"),
    ("ibv_context_ops", "alloc_mw"),
    ("ibv_async_event", "element"),
    ("ibv_send_wr", "wr"),
    ("ibv_send_wr", "qp_type"),
    ("ibv_send_wr", "bind_mw"),
    ("ibv_odp_caps", "per_transport_caps"),
    ("ibv_context", "mutex"),
    ("ibv_qp", "mutex"),
    ("ibv_qp", "cond"),
    ("ibv_cq_ex", "mutex"),
    ("ibv_cq_ex", "cond"),
    ("ibv_qp_init_attr_ex", "rx_hash_conf"),
    // Functions that are not called.
    ("verbs_context", "advise_mr"),
    ("verbs_context", "alloc_null_mr"),
    ("verbs_context", "read_counters"),
    ("verbs_context", "attach_counters_point_flow"),
    ("verbs_context", "create_counters"),
    ("verbs_context", "destroy_counters"),
    ("verbs_context", "reg_dm_mr"),
    ("verbs_context", "alloc_dm"),
    ("verbs_context", "free_dm"),
    ("verbs_context", "modify_flow_action_esp"),
    ("verbs_context", "destroy_flow_action"),
    ("verbs_context", "create_flow_action_esp"),
    ("verbs_context", "modify_qp_rate_limit"),
    ("verbs_context", "alloc_parent_domain"),
    ("verbs_context", "dealloc_td"),
    ("verbs_context", "alloc_td"),
    ("verbs_context", "modify_cq"),
    ("verbs_context", "post_srq_ops"),
    ("verbs_context", "destroy_rwq_ind_table"),
    ("verbs_context", "create_rwq_ind_table"),
    ("verbs_context", "destroy_wq"),
    ("verbs_context", "modify_wq"),
    ("verbs_context", "create_wq"),
    ("verbs_context", "query_rt_values"),
    ("verbs_context", "ibv_destroy_flow"),
    ("verbs_context", "ABI_placeholder2"),
    ("verbs_context", "ibv_create_flow"),
    ("verbs_context", "ABI_placeholder1"),
    ("verbs_context", "open_qp"),
    ("verbs_context", "priv"),
    ("verbs_context", "get_srq_num"),
    ("verbs_context", "create_srq_ex"),
    ("verbs_context", "open_xrcd"),
    ("verbs_context", "close_xrcd"),
    ("ibv_qp_ex", "wr_atomic_cmp_swp"),
    ("ibv_qp_ex", "wr_atomic_fetch_add"),
    ("ibv_qp_ex", "wr_bind_mw"),
    ("ibv_qp_ex", "wr_local_inv"),
    ("ibv_qp_ex", "wr_rdma_read"),
    ("ibv_qp_ex", "wr_send"),
    ("ibv_qp_ex", "wr_send_imm"),
    ("ibv_qp_ex", "wr_send_inv"),
    ("ibv_qp_ex", "wr_send_tso"),
    ("ibv_qp_ex", "wr_set_ud_addr"),
    ("ibv_qp_ex", "wr_set_xrc_srqn"),
    ("ibv_qp_ex", "wr_set_inline_data_list"),
    ("ibv_cq_ex", "next_poll"),
    ("ibv_cq_ex", "read_vendor_err"),
    ("ibv_cq_ex", "read_src_qp"),
    // `__be64`, which is no `uint64_t` to a compiler.
    ("ibv_device_attr", "node_guid"),
    ("ibv_device_attr", "sys_image_guid"),
    // Enumerations with a negative value, so of another type than the others.
    ("ibv_device", "node_type"),
    ("ibv_device", "transport_type"),
];

/// Runs the C compiler on `source`; what it printed, and whether it was content.
fn compile(flags: &[&str], source: &str) -> std::io::Result<(bool, String)> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut child = Command::new(compiler)
        .args(flags)
        .args(["-std=gnu11", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().unwrap().write_all(source.as_bytes())?;
    let done = child.wait_with_output()?;
    let text = [done.stdout, done.stderr].concat();
    Ok((done.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// Whether there are headers; if not, the caller of the tests said that this is meant.
fn has_headers() -> bool {
    let problem = match compile(&["-fsyntax-only"], INCLUDES) {
        Ok((true, _)) => return true,
        Ok((false, said)) => said,
        Err(error) => format!("no C compiler: {error}"),
    };
    if std::env::var_os("IMMWIRE_WITHOUT_HEADERS").is_some_and(|value| value == "1") {
        println!(
            "NOT RUN: IMMWIRE_WITHOUT_HEADERS=1, and libibverbs's headers cannot be used: {problem}"
        );
        return false;
    }
    panic!(
        "libibverbs's headers cannot be used: apt-get install gcc libibverbs-dev, or set IMMWIRE_WITHOUT_HEADERS=1 to \
         go without this test\n{problem}"
    );
}

/// The C type that a Rust type, as `stringify!` writes it, stands for.
fn c_type(rust: &str) -> String {
    let rust = rust.split_whitespace().collect::<Vec<_>>().join(" ");
    let rust = rust.trim().trim_end_matches(',');
    if let Some(inner) = rust.strip_prefix("Option<").and_then(|it| it.strip_suffix('>')) {
        return c_type(inner);
    }
    if let Some(function) = rust.strip_prefix("unsafe extern \"C\" fn(") {
        let (parameters, returns) = function.rsplit_once(')').expect("a function");
        let returns = returns.trim().strip_prefix("->").map_or_else(|| "void".to_owned(), c_type);
        let parameters = parameters.split(',').filter(|parameter| !parameter.trim().is_empty());
        let types = parameters.map(|it| c_type(it.split_once(':').expect("named").1));
        let types = types.collect::<Vec<_>>().join(", ");
        let types = if types.is_empty() { "void" } else { &types };
        return format!("{returns} (*)({types})");
    }
    if let Some(inner) = rust.strip_prefix("*mut ") {
        return c_type(inner) + " *";
    }
    if let Some(inner) = rust.strip_prefix("*const ") {
        return c_type(inner) + " const *";
    }
    if let Some(array) = rust.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        let (element, count) = array.split_once(';').expect("an array");
        return format!("{} [{}]", c_type(element), count.trim());
    }
    match rust {
        "c_void" => "void".to_owned(),
        "c_char" => "char".to_owned(),
        "c_int" => "int".to_owned(),
        "u8" => "uint8_t".to_owned(),
        "u16" => "uint16_t".to_owned(),
        "u32" => "uint32_t".to_owned(),
        "u64" => "uint64_t".to_owned(),
        "usize" => "size_t".to_owned(),
        "ibv_gid" => "union ibv_gid".to_owned(),
        name if ENUMS.contains(&name) => format!("enum {name}"),
        name if name.starts_with("ibv_")
            || name.starts_with("_compat_")
            || name.starts_with("verbs_") =>
        {
            format!("struct {name}")
        }
        name => panic!("a type that this test does not know: {name}"),
    }
}

/// How the assertions come out: as the crate has it, or each one wrong.
#[derive(Clone, Copy, PartialEq)]
enum Say {
    Right,
    Wrong,
}

/// The assertions as a C program, and their names.
struct Program {
    say: Say,
    source: String,
    names: Vec<String>,
}

impl Program {
    fn new(say: Say) -> Self {
        let mut program = Self { say, source: INCLUDES.to_owned(), names: Vec::new() };
        for item in STRUCTS.iter().copied().flatten() {
            program.structure(item);
        }
        for place in PLACES {
            let label = format!("{}.{}", place.name, place.path);
            program.layout(&label, place.name, place.path, place.offset, place.size);
        }
        for (name, ty) in SYMBOLS {
            program.same(&format!("symbol {name}"), &format!("__typeof__(&{name})"), &c_type(ty));
        }
        for name in ENUMS {
            program.same(&format!("enum {name}"), &format!("enum {name}"), "unsigned int");
        }
        for constant in CONSTANTS {
            let wrong = i128::from(say == Say::Wrong);
            let value = format!("({}LL)", constant.value + wrong);
            program.assert(
                &format!("constant {}", constant.name),
                &format!("({}) == {value}", constant.name),
            );
        }
        program
    }

    fn structure(&mut self, item: &Struct) {
        let name = item.name;
        let last = item.fields.last().expect("a field");
        for field in item.fields {
            let field = Field { name: field.name.trim_start_matches("r#"), ..*field };
            let label = format!("{name}.{}", field.name);
            match item.part {
                Part::Whole | Part::Prefix => {
                    self.layout(&label, name, field.name, field.offset, field.size);
                }
                Part::Suffix => {
                    let wrong = usize::from(self.say == Say::Wrong);
                    let behind = last.offset - field.offset + wrong;
                    let at = |field: &str| format!("offsetof(struct {name}, {field})");
                    let distance = format!("{} - {} == {behind}", at(last.name), at(field.name));
                    self.assert(&format!("offset {label}"), &distance);
                    self.size(&label, name, field.name, field.size);
                }
            }
            if !UNTYPED.contains(&(name, field.name)) {
                let place = format!("__typeof__(((struct {name} *)0)->{})", field.name);
                self.same(&format!("type {label}"), &place, &c_type(field.ty));
            }
        }
        let compare = if item.part == Part::Whole { "==" } else { ">=" };
        let wrong = if self.say == Say::Wrong { 4096 } else { 0 };
        let whole = format!("sizeof(struct {name}) {compare} {}", item.size + wrong);
        self.assert(&format!("whole {name}"), &whole);
    }

    fn layout(&mut self, label: &str, name: &str, path: &str, offset: usize, size: usize) {
        let offset = offset + usize::from(self.say == Say::Wrong);
        self.assert(
            &format!("offset {label}"),
            &format!("offsetof(struct {name}, {path}) == {offset}"),
        );
        self.size(label, name, path, size);
    }

    fn size(&mut self, label: &str, name: &str, path: &str, size: usize) {
        let size = size + usize::from(self.say == Say::Wrong);
        let place = format!("sizeof(((struct {name} *)0)->{path})");
        self.assert(&format!("size {label}"), &format!("{place} == {size}"));
    }

    fn same(&mut self, label: &str, left: &str, right: &str) {
        let right = if self.say == Say::Wrong { "_Complex double" } else { right };
        self.assert(label, &format!("__builtin_types_compatible_p({left}, {right})"));
    }

    fn assert(&mut self, label: &str, condition: &str) {
        writeln!(self.source, "_Static_assert({condition}, \"[{label}]\");").unwrap();
        self.names.push(label.to_owned());
    }
}

#[test]
fn everything_is_as_in_the_headers() {
    if !has_headers() {
        return;
    }
    let program = Program::new(Say::Right);
    let (good, said) = compile(&["-fsyntax-only", "-w"], &program.source).unwrap();
    assert!(good, "libibverbs's headers say otherwise:\n{said}");
    assert!(program.names.len() > 500, "only {} facts were compared", program.names.len());
    println!("{} facts are as in the headers", program.names.len());
}

/// Says each thing wrongly, by one or as another type, and expects the compiler to object to each.
#[test]
fn the_checker_notices_each_error() {
    if !has_headers() {
        return;
    }
    let program = Program::new(Say::Wrong);
    let (good, said) =
        compile(&["-fsyntax-only", "-w", "-fmax-errors=0"], &program.source).unwrap();
    assert!(!good);
    for name in &program.names {
        assert!(said.contains(&format!("[{name}]")), "not noticed: {name}");
    }
    println!("{} planted errors were noticed", program.names.len());
}

/// Types as the crate writes them.
#[test]
fn rust_types_are_said_in_c() {
    for (rust, c) in [
        ("*const c_char", "char const *"),
        ("*mut *mut ibv_device", "struct ibv_device * *"),
        ("[c_char; 64]", "char [64]"),
        ("ibv_mtu", "enum ibv_mtu"),
        ("unsafe extern \"C\" fn() -> *mut c_void", "void * (*)(void)"),
        (
            "Option<unsafe extern \"C\" fn(cq: *mut ibv_cq, num_entries: c_int,\n wc: *mut ibv_wc) -> c_int>",
            "int (*)(struct ibv_cq *, int, struct ibv_wc *)",
        ),
        (
            "unsafe extern \"C\" fn(cq: *mut ibv_cq, nevents: u32)",
            "void (*)(struct ibv_cq *, uint32_t)",
        ),
    ] {
        assert_eq!(c_type(rust), c, "{rust}");
    }
}
