//! The choices of a rank's tokens, as a peer sends them.
#![no_main]

use immwire_core::moe::{DROPPED, Routing, TableShape, Vector};
use libfuzzer_sys::fuzz_target;

/// What is in the caller's memory before.
const BEFORE: i32 = -7;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[top_k, max_tokens, tokens, epoch], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let shape = TableShape { top_k: u32::from(top_k % 40), max_tokens: u32::from(max_tokens % 64) };
    let epoch = epoch.into();
    let mut table: Vec<Vector> = rest.chunks_exact(16).map(vector).collect();
    read(shape, epoch, &table);
    // As far as a table says of itself that it is of this round, it is let through to what it says.
    if let Some((head, body)) = table.split_first_mut() {
        *head = [u32::from(tokens % 64), shape.max_tokens, epoch, epoch];
        body.iter_mut().for_each(|vector| vector[3] = epoch);
    }
    read(shape, epoch, &table);
});

fn vector(bytes: &[u8]) -> Vector {
    std::array::from_fn(|word| {
        let bytes = bytes.iter().skip(word * 4).take(4);
        bytes.rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
    })
}

/// What is let through is inside the shape, and is the same table when it is written again.
fn read(shape: TableShape, epoch: u32, table: &[Vector]) {
    let top_k = shape.top_k as usize;
    // More than the shape needs: that it holds is not for want of room.
    let room = (shape.max_tokens as usize + 64) * top_k;
    let (mut indices, mut weights) = (vec![BEFORE; room], vec![0.5; room]);
    let Ok(tokens) = shape.decode(epoch, table, &mut indices, &mut weights) else { return };
    assert!(tokens <= shape.max_tokens);
    let (indices, rest) = indices.split_at(tokens as usize * top_k);
    let weights = &weights[..indices.len()];
    assert!(rest.iter().all(|index| *index == BEFORE));
    assert!(indices.iter().all(|index| (DROPPED..65_535).contains(index)));
    let mut again = vec![[0; 4]; table.len()];
    let len = shape.encode(epoch, indices, weights, &mut again).expect("it was read");
    assert_eq!(again[0], table[0]);
    let pairs = top_k.div_ceil(2);
    for (at, (ours, theirs)) in again[1..len].iter().zip(&table[1..]).enumerate() {
        // The weight of a choice that a token does not have says nothing; bits of what is no number may change.
        let halves = if top_k % 2 == 1 && at % pairs == pairs - 1 { 1 } else { 2 };
        for half in 0..halves {
            let same = ours[half] == theirs[half] || f32::from_bits(theirs[half]).is_nan();
            assert!(same, "{ours:?} of {theirs:?}");
        }
        assert_eq!(ours[2..], theirs[2..]);
    }
    if let Ok(routing) = Routing::new(indices, shape.top_k, 256) {
        assert_eq!(routing.tokens(), tokens);
    }
}
