//! The file: eight bytes, a version, then frames of (length, checksum, payload). The first one holds the sizes.

use std::io::Read;

use super::TraceError;
use super::bytes::{Input, Problem, crc32, put};
use crate::config::{CoreConfig, Policy};

const MAGIC: [u8; 8] = *b"OLTRACE\n";
/// Changes with everything that another version's reader would misunderstand, the scheduler's rules included.
pub(super) const VERSION: u32 = 5;
/// A frame of events is begun anew from this size on.
pub(super) const FRAME_BYTES: usize = 1 << 20;
/// No frame is larger: the longest prompt takes less.
const MAX_FRAME_BYTES: u32 = 1 << 27;
/// Tokens that the pool of a trace may hold: reading a few bytes must not take all the memory there is.
const MAX_POOL_TOKENS: u64 = 1 << 27;
const MAX_RELEASE_BYTES: u32 = 64;

/// What a trace says about itself.
#[derive(Debug, Clone)]
pub(super) struct Head {
    /// Version of the core that wrote it.
    pub(super) release: String,
    pub(super) config: CoreConfig,
}

/// Magic, version, first frame.
pub(super) fn opening(config: &CoreConfig) -> Vec<u8> {
    let release = env!("CARGO_PKG_VERSION");
    let mut payload = Vec::new();
    put(&mut payload, release.len() as u64);
    payload.extend_from_slice(release.as_bytes());
    for value in [
        config.num_blocks,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.mixed_step_tokens.unwrap_or(0),
        config.max_model_len,
        config.vocab_size,
        u32::from(config.enable_prefix_caching),
        u32::from(config.policy == Policy::Priority),
        config.max_steps_in_flight,
    ] {
        put(&mut payload, u64::from(value));
    }
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    append_frame(&mut bytes, &payload);
    bytes
}

fn read_head(payload: &[u8]) -> Result<Head, Problem> {
    let mut input = Input::new(payload);
    let len = input.at_most(MAX_RELEASE_BYTES, "the release's length")?;
    let release = (0..len)
        .map(|_| input.byte("the release").map(char::from))
        .collect::<Result<_, _>>()?;
    let mut next = |what: &str| input.at_most(u32::MAX, what);
    let config = CoreConfig {
        num_blocks: next("num_blocks")?,
        block_size: next("block_size")?,
        max_num_seqs: next("max_num_seqs")?,
        max_num_batched_tokens: next("max_num_batched_tokens")?,
        mixed_step_tokens: Some(next("mixed_step_tokens")?).filter(|&tokens| tokens > 0),
        max_model_len: next("max_model_len")?,
        vocab_size: next("vocab_size")?,
        // Vectors are not replayed, and neither are numbers.
        hidden_size: 0,
        enable_prefix_caching: next("enable_prefix_caching")? != 0,
        policy: if next("policy")? == 0 {
            Policy::Fcfs
        } else {
            Policy::Priority
        },
        max_steps_in_flight: next("max_steps_in_flight")?,
        seed: 0,
        hash_key: None,
    };
    config.validate().map_err(|error| error.to_string())?;
    let pool_tokens = u64::from(config.num_blocks) * u64::from(config.block_size);
    if pool_tokens > MAX_POOL_TOKENS {
        return Err(format!(
            "its pool of {pool_tokens} tokens exceeds the {MAX_POOL_TOKENS} that are replayed"
        ));
    }
    Ok(Head { release, config })
}

/// Appends a frame.
pub(super) fn append_frame(bytes: &mut Vec<u8>, payload: &[u8]) {
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&crc32(payload).to_le_bytes());
    bytes.extend_from_slice(payload);
}

/// Reads frame after frame.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    input: R,
    /// Bytes read.
    offset: u64,
    /// Where the present frame begins.
    begin: u64,
}

impl<R: Read> FrameReader<R> {
    /// Reads up to the end of the first frame.
    pub(super) fn open(input: R) -> Result<(Self, Head), TraceError> {
        let mut reader = Self {
            input,
            offset: 0,
            begin: 0,
        };
        let mut opening = [0; 12];
        let num_read = reader.fill(&mut opening)?;
        if !opening.starts_with(&MAGIC) || num_read < MAGIC.len() {
            return Err(TraceError::NoTrace);
        }
        if num_read < opening.len() {
            return Err(reader.cut_off());
        }
        let found = word(&opening[MAGIC.len()..]);
        if found != VERSION {
            return Err(TraceError::Version {
                found,
                known: VERSION,
            });
        }
        let payload = reader.next()?.ok_or(TraceError::CutOff { offset: 12 })?;
        let head = read_head(&payload).map_err(|problem| reader.damaged(problem))?;
        Ok((reader, head))
    }

    /// The next frame's payload; `None` where the file ends between frames.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, TraceError> {
        self.begin = self.offset;
        let mut prefix = [0; 8];
        match self.fill(&mut prefix)? {
            0 => return Ok(None),
            8 => {}
            _ => return Err(self.cut_off()),
        }
        let mut words = prefix.chunks_exact(4).map(word);
        let (len, crc) = (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        );
        if len > MAX_FRAME_BYTES {
            return Err(self.damaged(format!("it claims {len} bytes")));
        }
        // Grows with what is there, not with what is claimed.
        let mut payload = Vec::new();
        let read = self
            .input
            .by_ref()
            .take(len.into())
            .read_to_end(&mut payload);
        let num_read = read.map_err(|error| TraceError::Io(error.to_string()))?;
        self.offset += num_read as u64;
        if num_read < len as usize {
            return Err(self.cut_off());
        }
        if crc32(&payload) != crc {
            return Err(self.damaged("its checksum is another".into()));
        }
        Ok(Some(payload))
    }

    /// The error for the present frame.
    pub(super) fn damaged(&self, problem: Problem) -> TraceError {
        TraceError::Damaged {
            offset: self.begin,
            problem,
        }
    }

    fn cut_off(&self) -> TraceError {
        TraceError::CutOff { offset: self.begin }
    }

    /// Fills the buffer as far as the input goes.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, TraceError> {
        let mut num_read = 0;
        while num_read < buffer.len() {
            match self.input.read(&mut buffer[num_read..]) {
                Ok(0) => break,
                Ok(count) => num_read += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(TraceError::Io(error.to_string())),
            }
        }
        self.offset += num_read as u64;
        Ok(num_read)
    }
}

/// Four bytes as a number, least significant first.
fn word(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .rev()
        .fold(0, |word, &byte| word << 8 | u32::from(byte))
}
