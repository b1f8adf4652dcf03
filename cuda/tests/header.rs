//! The kernels' header: plain C, without a framework, and the same as the Rust side. Needs a C compiler, and no GPU.

use immwire_cuda::args::{self, CopyArgs, PagesArgs, ReleaseArgs, StandbyArgs, TurnsArgs};
use immwire_cuda::moe::args::{self as moe, MoeArgs, MoeControl, MoePair, MoeReport};
use std::mem::{align_of, offset_of, size_of};
use std::path::PathBuf;
use std::process::Command;

/// Compiles `body` as the statements of a function beside the header, as strict C11; what the compiler says if it fails.
fn compile(name: &str, body: &str) -> Result<(), String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let source = folder.join(format!("{name}.c"));
    let text = format!(
        "#include \"immwire_cuda.h\"\n#include \"immwire_moe.h\"\nvoid f(void);\nvoid f(void) {{\n{body}}}\n"
    );
    std::fs::write(&source, text).map_err(|e| e.to_string())?;
    let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    let done = Command::new("cc")
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-pedantic",
            "-Werror",
            "-fsyntax-only",
            "-I",
            kernels,
        ])
        .arg(&source)
        .output()
        .map_err(|e| format!("cc: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&done.stderr).into_owned())
}

fn equal(what: &str, value: usize) -> String {
    format!("  _Static_assert({what} == {value}, \"{what}\");\n")
}

/// One assertion for each field of a structure: where it is, and how large.
macro_rules! fields {
    ($c:literal, $rust:ty, $($field:ident),+) => {{
        let value = <$rust>::default();
        let mut text = equal(concat!("sizeof(", $c, ")"), size_of::<$rust>());
        text += &equal(concat!("_Alignof(", $c, ")"), align_of::<$rust>());
        $(
            let (at, size) = (offset_of!($rust, $field), size_of_val(&value.$field));
            text += &equal(&format!("offsetof({}, {})", $c, stringify!($field)), at);
            text += &equal(&format!("sizeof((({} *)0)->{})", $c, stringify!($field)), size);
        )+
        text
    }};
}

#[test]
fn structures_are_the_same_in_c() {
    let text = fields!("immwire_pages", PagesArgs, base, stride, table)
        + &fields!("immwire_release", ReleaseArgs, word, value, arrivals, kind, reserved)
        + &fields!(
            "immwire_copy_args",
            CopyArgs,
            source,
            target,
            release,
            page_bytes,
            piece_bytes,
            pieces_per_page,
            piece_count,
            page_count,
            stage_bytes,
            stage_count,
            turns
        )
        + &fields!("immwire_turns", TurnsArgs, asked, dealt, pieces, count, reserved)
        + &fields!("immwire_standby_args", StandbyArgs, seats, idle_ns, shift_ns, launch, reserved);
    compile("structures", &text).unwrap();
}

#[test]
fn structures_of_moe_are_the_same_in_c() {
    let text = fields!(
        "immwire_moe_control",
        MoeControl,
        next_epoch,
        next_parity,
        missed,
        left_out,
        epoch,
        parity,
        absent,
        tokens,
        pairs,
        of_others,
        summed,
        sent,
        few,
        suspects,
        gathered,
        planned,
        received,
        parts,
        unheard,
        refused,
        abort,
        decisions
    ) + &fields!(
        "immwire_moe_report",
        MoeReport,
        late_table,
        late_tokens,
        late_results,
        refused,
        token,
        choice,
        index,
        rows_left_out,
        tokens_left_out,
        reserved
    ) + &fields!("immwire_moe_pair", MoePair, source, token, reserved)
        + &fields!(
            "immwire_moe_args",
            MoeArgs,
            inbox,
            firsts,
            control,
            report,
            plan,
            masks,
            scratch,
            tokens_at,
            x,
            scales,
            indices,
            weights,
            rows_x,
            rows_scales,
            slots,
            counts,
            offsets,
            y,
            out,
            timeout_ns,
            table_bytes,
            dispatch_at,
            combine_at,
            dispatch_stride,
            combine_stride,
            plan_stride,
            rank,
            world,
            top_k,
            max_tokens,
            tokens,
            token_bytes,
            scale_bytes,
            values,
            padding,
            rows,
            flags,
            chunk_tokens,
            results_each,
            few_tokens,
            reserved
        );
    compile("structures_of_moe", &text).unwrap();
}

#[test]
fn constants_of_moe_are_the_same_in_c() {
    let constants = [
        ("IMMWIRE_MOE_MAX_RANKS", moe::MAX_RANKS),
        ("IMMWIRE_MOE_MAX_TOP_K", moe::MAX_TOP_K as usize),
        ("IMMWIRE_MOE_MAX_EXPERTS", moe::MAX_EXPERTS as usize),
        ("IMMWIRE_MOE_THREADS", moe::THREADS as usize),
        ("IMMWIRE_MOE_FEW_THREADS", moe::FEW_THREADS as usize),
        ("IMMWIRE_MOE_BATCH", moe::BATCH as usize),
        ("IMMWIRE_MOE_PARTS", moe::PARTS as usize),
        ("IMMWIRE_MOE_CHUNK", moe::CHUNK as usize),
        ("IMMWIRE_MOE_MANY_WORDS", moe::MANY_WORDS as usize),
        ("IMMWIRE_MOE_LAST_EPOCH", moe::LAST_EPOCH as usize),
        ("IMMWIRE_MOE_KEY", moe::KEY as usize),
        ("IMMWIRE_MOE_KEYS", moe::KEYS as usize),
        ("IMMWIRE_MOE_SCALE_VALUES", moe::SCALE_VALUES as usize),
        ("IMMWIRE_MOE_FIXED_WORDS", moe::FIXED_WORDS as usize),
        ("IMMWIRE_MOE_SEND", moe::SEND as usize),
        ("IMMWIRE_MOE_RECEIVE", moe::RECEIVE as usize),
        ("IMMWIRE_MOE_WIDE_INDICES", moe::WIDE_INDICES as usize),
        ("IMMWIRE_MOE_CLEAR_PADDING", moe::CLEAR_PADDING as usize),
        ("IMMWIRE_MOE_POWER_SCALES", moe::POWER_SCALES as usize),
        ("IMMWIRE_MOE_ACCUMULATE", moe::ACCUMULATE as usize),
        ("IMMWIRE_MOE_NO_ROW", moe::NO_ROW as usize),
        ("IMMWIRE_MOE_LEFT_OUT", moe::LEFT_OUT as usize),
    ];
    let text: String = constants.iter().map(|(name, value)| equal(name, *value)).collect();
    compile("constants_of_moe", &text).unwrap();
}

#[test]
fn constants_are_the_same_in_c() {
    let constants = [
        ("IMMWIRE_RELEASE_NONE", args::RELEASE_NONE),
        ("IMMWIRE_RELEASE_STORE", args::RELEASE_STORE),
        ("IMMWIRE_RELEASE_ADD", args::RELEASE_ADD),
        ("IMMWIRE_ANY_THREADS", args::ANY_THREADS),
        ("IMMWIRE_VECTOR_THREADS", args::VECTOR_THREADS),
        ("IMMWIRE_BULK_THREADS", args::BULK_THREADS),
        ("IMMWIRE_BULK_WARPS", args::BULK_WARPS),
        ("IMMWIRE_BULK_MAX_STAGES", args::BULK_MAX_STAGES),
        ("IMMWIRE_BULK_LAG", args::BULK_LAG),
        ("IMMWIRE_TURN_MAX_PIECES", args::TURN_MAX_PIECES),
        ("IMMWIRE_STANDBY_SEATS", args::STANDBY_SEATS),
        ("IMMWIRE_STANDBY_THREADS", args::STANDBY_THREADS),
        ("IMMWIRE_SEAT_BYTES", args::SEAT_BYTES),
        ("IMMWIRE_SEAT_STATUS", args::SEAT_STATUS),
    ];
    let text: String = constants.iter().map(|(name, value)| equal(name, *value as usize)).collect();
    compile("constants", &text).unwrap();
}

/// The comparison notices a difference.
#[test]
fn a_wrong_size_is_noticed() {
    let said = compile("wrong", &equal("sizeof(immwire_pages)", 32)).unwrap_err();
    assert!(said.contains("sizeof(immwire_pages)"), "{said}");
}
