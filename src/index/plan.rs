//! How a store is to be read: which layer it is of, and how its names find their content.

use smallvec::SmallVec;

use super::groups::Move;
use super::rank::{Rank, Shape};
use super::tree::Layer;
use super::{StoreRefusal, StoreRequest, StoreTokens};
use crate::block::{AttentionKind, BlockHash, BlockSize, LocalBlockHash, Tier};

/// How a store's names find their content.
pub(super) struct Plan {
    pub(super) layer: Layer,
    pub(super) placing: Placing,
    pub(super) shape: Shape,
    /// Blocks per chunk, where the names are parts or chunks.
    pub(super) chunk_len: u32,
    /// Groups that change their slots first.
    pub(super) moves: SmallVec<[Move; 2]>,
}

#[derive(Clone, Copy)]
pub(super) enum Placing {
    /// The tokens say it: so many per name.
    Tokens { tokens_per_name: usize },
    /// A name that the rank knows says it, else the tokens.
    NameThenTokens { tokens_per_name: usize },
    /// Only a name that the rank knows can say it.
    Name,
}

impl Plan {
    pub(super) fn of(
        request: &StoreRequest<'_>,
        rank: &mut Rank,
        block_size: BlockSize,
    ) -> Result<Self, StoreRefusal> {
        check_parents(request)?;
        let without_tokens = matches!(request.tokens, StoreTokens::Unusable | StoreTokens::Ids([]));
        let is_placeholder = matches!(request.tokens, StoreTokens::Ids([]));
        let (slot, moves) =
            rank.groups.slot_for_store(request.group, is_placeholder).ok_or(StoreRefusal::TooManyGroups)?;
        let layer = Layer { tier: request.tier, slot };
        let lower = request.tier != Tier::Device;
        let in_chunks = rank.settings.host_chunk_blocks.filter(|_| lower).map_or(1, |blocks| blocks.get());
        let of_parts = if in_chunks > 1 { Shape::Part } else { Shape::Block };
        let mut plan = Self { layer, placing: Placing::Name, shape: of_parts, chunk_len: in_chunks, moves };
        if without_tokens {
            return Ok(plan);
        }
        let size = BlockSize::new(request.block_size);
        let lines_up = lines_up(request, size, block_size);
        let multiple = size.map_or(0, |size| size.get() / block_size.get());
        let is_multiple = size.is_some_and(|size| size.get() % block_size.get() == 0);
        let group = rank.groups.of_slot_mut(slot);
        let is_full = group.kind == AttentionKind::Full;
        if is_full && size.is_some_and(|size| size != block_size) && !(lower && is_multiple) {
            return Err(StoreRefusal::BlockSizeMismatch);
        }
        // What a group that is left out says need not line up, since nothing rests on it.
        let may_differ = matches!(group.kind, AttentionKind::SlidingWindow { .. } | AttentionKind::Unknown);
        if !lines_up && !may_differ {
            return Err(StoreRefusal::TokenMismatch);
        }
        if is_full {
            group.block_size = Some(block_size);
        } else if !lower || group.block_size.is_none() {
            group.block_size = size.or(group.block_size);
        }
        if lower && is_multiple && multiple > 1 {
            (plan.shape, plan.chunk_len) = (Shape::Chunk, multiple);
        }
        // Keys are located within the group's block; a larger block's cannot be split.
        let splittable = size == Some(block_size) || request.keys.iter().all(SmallVec::is_empty);
        if lines_up && is_multiple && splittable {
            let tokens_per_name = request.block_size as usize;
            plan.placing = if is_full {
                Placing::Tokens { tokens_per_name }
            } else {
                Placing::NameThenTokens { tokens_per_name }
            };
        }
        Ok(plan)
    }

    pub(super) fn is_lower(&self) -> bool {
        self.layer.tier != Tier::Device
    }
}

fn lines_up(request: &StoreRequest<'_>, size: Option<BlockSize>, block_size: BlockSize) -> bool {
    let names = request.names.len();
    match request.tokens {
        StoreTokens::Unusable => false,
        StoreTokens::Ids(tokens) => {
            size.is_some_and(|size| names.checked_mul(size.as_usize()) == Some(tokens.len()))
        }
        StoreTokens::Windows { tokens, len, stride } => {
            let last = names.checked_sub(1).and_then(|last| last.checked_mul(stride));
            let covers = len >= block_size.as_usize() && stride > 0;
            covers
                && size == Some(block_size)
                && last.and_then(|last| last.checked_add(len)) == Some(tokens.len())
        }
        // A hash is of one block of ours, so it says nothing of another size.
        StoreTokens::Locals(locals) => locals.len() == names && size == Some(block_size),
    }
}

/// A block that names itself as its parent would hang behind itself.
fn check_parents(request: &StoreRequest<'_>) -> Result<(), StoreRefusal> {
    let own = request.parent.is_some() && request.parent == request.names.first();
    let behind = request.names.get(1..).unwrap_or(&[]);
    let next = request.names.iter().zip(behind).any(|pair| match pair {
        (BlockHash::Int(a), BlockHash::Int(b)) => a == b,
        (a, b) => a == b,
    });
    if own || next { Err(StoreRefusal::SelfParent) } else { Ok(()) }
}

/// What a name of a store stands for.
#[derive(Clone, Copy)]
pub(super) enum NameContent<'a> {
    Tokens(&'a [u32]),
    /// One block's, and those behind it that the name covers too.
    Window(&'a [u32]),
    Local(LocalBlockHash),
}

impl<'a> NameContent<'a> {
    /// The content of the name at `at`.
    pub(super) fn of(tokens: StoreTokens<'a>, tokens_per_name: usize, at: usize) -> Option<Self> {
        match tokens {
            StoreTokens::Ids(tokens) => {
                tokens.get(at * tokens_per_name..(at + 1) * tokens_per_name).map(Self::Tokens)
            }
            StoreTokens::Windows { tokens, len, stride } => {
                tokens.get(at * stride..at * stride + len).map(Self::Window)
            }
            StoreTokens::Locals(locals) => locals.get(at).copied().map(Self::Local),
            StoreTokens::Unusable => None,
        }
    }
}
