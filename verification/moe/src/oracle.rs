//! What must come of an exchange, worked out another way than the kernels do: sorted lists, sums over maps, and the nearest
//! of two numbers. And tokens to try it with.

#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of tokens and experts, and what is cut off is meant to be"
)]

use immwire::moe::Format;
use immwire_cuda::moe::args;
use immwire_cuda::moe::geometry::{Geometry, Number, Payload, Scales, Shape};
use std::collections::BTreeMap;

/// Splitmix64.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Any 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u32) -> u32 {
        (self.draw() % u64::from(limit.max(1))) as u32
    }

    /// True once in so many times.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
}

/// What a rank has in one round.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// How many.
    pub count: u32,
    /// Bytes as they are handed in.
    pub x: Vec<u8>,
    /// Bytes of scales.
    pub scales: Vec<u8>,
    /// `[count][top_k]`.
    pub indices: Vec<i32>,
    /// `[count][top_k]`.
    pub weights: Vec<f32>,
    /// What results are added to, if to anything: `[count][values]`.
    pub onto: Option<Vec<u8>>,
}

/// One round: what every rank sends, and what every rank's experts answer.
#[derive(Debug, Clone, Copy)]
pub struct Round<'a> {
    /// What the exchange is made for.
    pub shape: &'a Shape,
    /// The sizes of it.
    pub geometry: &'a Geometry,
    /// By rank.
    pub tokens: &'a [Tokens],
    /// By rank: rows of values.
    pub results: &'a [Vec<u8>],
}

/// Draws tokens and values for a shape.
#[derive(Debug, Clone, Copy)]
pub struct Maker<'a> {
    /// The shape.
    pub shape: &'a Shape,
}

impl Maker<'_> {
    /// Random tokens, with much poison among raw ones.
    pub fn random_tokens(&self, random: &mut Random) -> Tokens {
        self.random_tokens_up_to(random, self.shape.max_tokens)
    }

    /// The same, no more than so many.
    pub fn random_tokens_up_to(&self, random: &mut Random, most: u32) -> Tokens {
        let count = match random.below(4) {
            0 => 0,
            1 => most,
            _ => random.below(most + 1),
        };
        self.tokens(random, count)
    }

    /// So many tokens.
    pub fn tokens(&self, random: &mut Random, count: u32) -> Tokens {
        let top_k = self.shape.top_k;
        let mut indices = Vec::new();
        let favourite = random.below(experts(self.shape));
        let skewed = random.one_in(3);
        for _ in 0..count {
            let mut all: Vec<i32> = (0..experts(self.shape) as i32).collect();
            let mut row = Vec::new();
            for _ in 0..top_k {
                if all.is_empty() || random.one_in(6) {
                    row.push(-1);
                    continue;
                }
                let mut at = random.below(all.len() as u32) as usize;
                if skewed && random.below(4) != 0 {
                    at = all.iter().position(|e| *e == favourite as i32).unwrap_or(at);
                }
                row.push(all.swap_remove(at));
            }
            indices.extend(row);
        }
        let weights =
            indices.iter().map(|_| (random.below(2000) as f32 - 1000.0) / 300.0).collect();
        let (x, scales) = match self.shape.payload {
            Payload::Raw { token_bytes, scale_bytes } => {
                let mut raw = |bytes: u32| -> Vec<u8> {
                    let words = (count * bytes / 4) as usize;
                    let word = |_| match random.below(8) {
                        0 => u32::MAX,
                        1 => u32::MAX ^ 0x9e37_79b1_u32.wrapping_mul(random.below(3)),
                        _ => random.draw() as u32,
                    };
                    bytes_of(&(0..words).map(word).collect::<Vec<u32>>())
                };
                (raw(token_bytes), raw(scale_bytes))
            }
            Payload::Fp8 { from, .. } => (self.numbers(random, count, from), Vec::new()),
        };
        Tokens { count, x, scales, indices, weights, onto: None }
    }

    /// The same tokens, whose results are perhaps to be added to something.
    pub fn perhaps_onto(&self, random: &mut Random, tokens: Tokens) -> Tokens {
        let onto = |random| self.numbers(random, tokens.count, self.shape.results);
        let onto = random.one_in(3).then(|| onto(random));
        Tokens { onto, ..tokens }
    }

    /// Rows of values of 16 bits, of all sizes and kinds.
    pub fn numbers(&self, random: &mut Random, rows: u32, of: Number) -> Vec<u8> {
        let format = format(of);
        let value = |_: u32| match random.below(40) {
            0 => random.draw() as u16,
            1 => 0x8000,
            // What poison is made of.
            2 => u16::MAX,
            _ => {
                let size = 2f32.powi(random.below(24) as i32 - 14);
                format.store((random.below(2001) as f32 - 1000.0) / 1000.0 * size)
            }
        };
        bytes_of(&(0..rows * self.shape.values).map(value).collect::<Vec<u16>>())
    }
}

impl Round<'_> {
    /// Where the rows of `rank` lie if the tables of `present` count: by expert, source and token, with the token's choice.
    pub fn layout(&self, rank: usize, present: &[usize]) -> Layout {
        let (first, next) = (self.shape.firsts[rank], self.shape.firsts[rank + 1]);
        let mut by_expert: BTreeMap<u32, Vec<(usize, u32, u32)>> = BTreeMap::new();
        for &source in present {
            let tokens = &self.tokens[source];
            let rows = tokens.indices.chunks_exact(self.shape.top_k as usize);
            for (token, row) in rows.enumerate() {
                for (choice, expert) in row.iter().enumerate() {
                    if (first as i32..next as i32).contains(expert) {
                        let at = (source, token as u32, choice as u32);
                        by_expert.entry(*expert as u32).or_default().push(at);
                    }
                }
            }
        }
        let mut layout = Layout::default();
        let mut row = 0;
        for expert in first..next {
            layout.offsets.push(row);
            let all = by_expert.remove(&expert).unwrap_or_default();
            layout.counts.push(all.len() as u32);
            for (n, at) in all.iter().enumerate() {
                layout.rows.insert(*at, row + n as u32);
            }
            row += (all.len() as u32).next_multiple_of(self.shape.padding);
        }
        layout.offsets.push(row);
        layout
    }

    /// What is to arrive of a token: payload and scales.
    pub fn arrives(&self, source: usize, token: u32) -> (Vec<u8>, Vec<u8>) {
        let tokens = &self.tokens[source];
        let nth = |bytes: &[u8], each: usize| {
            bytes[token as usize * each..(token as usize + 1) * each].to_vec()
        };
        match self.shape.payload {
            Payload::Raw { token_bytes, scale_bytes } => {
                (nth(&tokens.x, token_bytes as usize), nth(&tokens.scales, scale_bytes as usize))
            }
            Payload::Fp8 { from, scales } => {
                let row = nth(&tokens.x, self.shape.values as usize * 2);
                let values: Vec<f32> = row
                    .chunks_exact(2)
                    .map(|v| format(from).load(u16::from_ne_bytes([v[0], v[1]])))
                    .collect();
                quantised(&values, scales, self.geometry.scale_bytes as usize)
            }
        }
    }

    /// What `rank` sends back for a token, as it is rounded; `None` if it has none of its experts.
    pub fn part(
        &self,
        rank: usize,
        layout: &Layout,
        source: usize,
        token: u32,
    ) -> Option<Vec<u16>> {
        let (values, format) = (self.shape.values as usize, format(self.shape.results));
        let answers = &self.results[rank];
        let mut sum = vec![0f32; values];
        let mut any = false;
        for choice in 0..self.shape.top_k {
            let Some(row) = layout.rows.get(&(source, token, choice)) else { continue };
            any = true;
            let at = token as usize * self.shape.top_k as usize + choice as usize;
            let weight = self.tokens[source].weights[at];
            let bytes = &answers[*row as usize * values * 2..][..values * 2];
            for (sum, value) in sum.iter_mut().zip(bytes.chunks_exact(2)) {
                *sum += weight * format.load(u16::from_ne_bytes([value[0], value[1]]));
            }
        }
        any.then(|| sum.into_iter().map(|value| format.store(value)).collect())
    }

    /// The result of a token if these ranks answer.
    pub fn result(&self, source: usize, token: u32, layouts: &[Option<Layout>]) -> Vec<u8> {
        let format = format(self.shape.results);
        let values = self.shape.values as usize;
        let mut total = vec![0f32; values];
        if let Some(onto) = &self.tokens[source].onto {
            let row = onto[token as usize * values * 2..].chunks_exact(2);
            for (total, value) in total.iter_mut().zip(row) {
                *total = format.load(u16::from_ne_bytes([value[0], value[1]]));
            }
        }
        if self.shape.exact {
            for choice in 0..self.shape.top_k {
                let found = layouts.iter().enumerate().find_map(|(rank, layout)| {
                    Some((rank, *layout.as_ref()?.rows.get(&(source, token, choice))?))
                });
                let Some((rank, row)) = found else { continue };
                let at = token as usize * self.shape.top_k as usize + choice as usize;
                let weight = self.tokens[source].weights[at];
                let bytes = &self.results[rank][row as usize * values * 2..][..values * 2];
                for (total, value) in total.iter_mut().zip(bytes.chunks_exact(2)) {
                    *total += weight * format.load(u16::from_ne_bytes([value[0], value[1]]));
                }
            }
            return bytes_of(&total.into_iter().map(|v| format.store(v)).collect::<Vec<u16>>());
        }
        for (rank, layout) in layouts.iter().enumerate() {
            let Some(layout) = layout else { continue };
            if let Some(part) = self.part(rank, layout, source, token) {
                for (total, value) in total.iter_mut().zip(part) {
                    *total += format.load(value);
                }
            }
        }
        bytes_of(&total.into_iter().map(|value| format.store(value)).collect::<Vec<u16>>())
    }
}

fn experts(shape: &Shape) -> u32 {
    shape.firsts.last().copied().unwrap_or(0)
}

mod plain {
    /// # Safety
    ///
    /// Without padding.
    pub unsafe trait Plain: Copy {}
}
use plain::Plain;

macro_rules! plain {
    ($($type:ty),+) => {
        // SAFETY: numbers, or structures of words that the header has without gaps.
        $(unsafe impl Plain for $type {})+
    };
}
plain!(u8, u16, u32, [u32; 4], i32, i64, f32, args::MoeControl);

/// The bytes of numbers, as this machine orders them.
#[must_use]
pub fn bytes_of<T: Plain>(values: &[T]) -> Vec<u8> {
    // SAFETY: numbers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
        .to_vec()
}

/// Where rows lie.
#[derive(Debug, Default, Clone)]
pub struct Layout {
    /// Tokens for each expert.
    pub counts: Vec<u32>,
    /// The first row of each, and all rows.
    pub offsets: Vec<u32>,
    /// By source, token and choice.
    pub rows: BTreeMap<(usize, u32, u32), u32>,
}

/// How values are stored.
#[must_use]
pub fn format(number: Number) -> Format {
    match number {
        Number::Bf16 => Format::Bf16,
        Number::Fp16 => Format::Fp16,
    }
}

/// The value of an e4m3 code.
fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    if code & 0x7f == 0x7f {
        return f32::NAN;
    }
    sign * if exponent == 0 {
        fraction * 2f32.powi(-9)
    } else {
        (8.0 + fraction) * 2f32.powi(exponent - 10)
    }
}

/// The nearest code; of two the even one.
fn to_e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let size = f64::from(value.abs().min(448.0));
    let distance = |code: u8| (f64::from(e4m3(code)) - size).abs();
    // Codes are in the order of their values: one of the two around it.
    let (mut low, mut high) = (0, 0x7e_u8);
    while high - low > 1 {
        let middle = u8::midpoint(low, high);
        if f64::from(e4m3(middle)) <= size { low = middle } else { high = middle }
    }
    let nearest = [low, high]
        .into_iter()
        .min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2))));
    nearest.unwrap_or(0) | if value.is_sign_negative() { 0x80 } else { 0 }
}

fn quantised(values: &[f32], scales: Scales, scale_bytes: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut out) = (Vec::new(), Vec::new());
    for group in values.chunks(args::SCALE_VALUES as usize) {
        let peak = group.iter().fold(1e-4f32, |peak, value| peak.max(value.abs()));
        let scale = peak * (1.0 / 448.0);
        let factor = match scales {
            Scales::Float => {
                out.extend(scale.to_ne_bytes());
                448.0 / peak
            }
            Scales::Power => {
                let power = (-127..=127).find(|n| 2f64.powi(*n) >= f64::from(scale)).unwrap_or(127);
                out.push((power + 127) as u8);
                2f32.powi(-power)
            }
        };
        codes.extend(group.iter().map(|value| to_e4m3(value * factor)));
    }
    out.resize(scale_bytes, 0);
    (codes, out)
}
