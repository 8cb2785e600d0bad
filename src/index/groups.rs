//! The attention groups of one rank: which slot each one's layers have, and how sure its kind is.

use smallvec::SmallVec;

use super::GroupTag;
use crate::block::{AttentionKind, BlockSize};

/// How sure a group's kind is; a surer word replaces the one before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Word {
    /// Only placeholders named the group: they say nothing of it, so its rule binds nobody.
    Vague,
    /// A store without a kind, so the kind is that of the number.
    Assumed,
    /// A store said it.
    Said,
}

/// An attention group of a rank. Slot 0 is reserved for the first full-attention group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// The engine's number; `None` where a slot is free.
    pub(super) idx: Option<u32>,
    pub(super) kind: AttentionKind,
    pub(super) word: Word,
    /// Tokens per block; `None` until a store said so.
    pub(super) block_size: Option<BlockSize>,
}

impl Group {
    const FREE: Self = Self { idx: None, kind: AttentionKind::Full, word: Word::Vague, block_size: None };

    /// Whether the group's rule binds.
    pub(super) fn binds(&self) -> bool {
        self.idx.is_some() && self.word > Word::Vague
    }

    fn leads(&self) -> bool {
        self.binds() && self.kind == AttentionKind::Full
    }
}

/// Groups of one rank. vLLM's largest hybrid models have fewer than ten; the slot must fit a layer.
const MAX_GROUPS: usize = 32;

/// A group's blocks go from one slot to another.
pub(super) type Move = (u8, u8);

/// All groups of a rank, by slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Groups(SmallVec<[Group; 1]>);

impl Default for Groups {
    fn default() -> Self {
        Self(SmallVec::from_elem(Group::FREE, 1))
    }
}

impl Groups {
    pub(super) fn as_slice(&self) -> &[Group] {
        &self.0
    }

    /// How many groups' rules bind.
    pub(super) fn bind(&self) -> usize {
        self.0.iter().filter(|group| group.binds()).count()
    }

    // At most MAX_GROUPS.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn slots(&self) -> u8 {
        self.0.len() as u8
    }

    pub(super) fn of_slot(&self, slot: u8) -> &Group {
        &self.0[usize::from(slot)]
    }

    pub(super) fn of_slot_mut(&mut self, slot: u8) -> &mut Group {
        &mut self.0[usize::from(slot)]
    }

    /// The slot of a group that has stored something; removals carry only the number.
    pub(super) fn slot_of(&self, idx: u32) -> Option<u8> {
        let at = self.0.iter().position(|group| group.idx == Some(idx))?;
        u8::try_from(at).ok()
    }

    /// The slot of the group that a store names, made if it is new, and the moves that must come first; `None`
    /// past the limit on groups.
    ///
    /// Where no kind is given, group 0 or no group is full attention and others are left out.
    pub(super) fn slot_for_store(
        &mut self,
        tag: GroupTag,
        is_placeholder: bool,
    ) -> Option<(u8, SmallVec<[Move; 2]>)> {
        let idx = tag.idx.unwrap_or(0);
        let assumed = if idx == 0 { AttentionKind::Full } else { AttentionKind::Unknown };
        let word = match tag.kind {
            Some(_) => Word::Said,
            None if is_placeholder => Word::Vague,
            None => Word::Assumed,
        };
        let kind = tag.kind.unwrap_or(assumed);
        match self.slot_of(idx) {
            Some(slot) => {
                let group = self.of_slot_mut(slot);
                // Of what was said the first stays for slot 0: its layer is what queries ask about first.
                let surer = word > group.word || (word == Word::Said && slot > 0);
                if !surer || (group.kind == kind && group.word == word) {
                    return Some((slot, SmallVec::new()));
                }
                (group.kind, group.word) = (kind, word);
            }
            None => {
                let slot = self.free_slot(kind == AttentionKind::Full && word > Word::Vague)?;
                *self.of_slot_mut(slot) = Group { idx: Some(idx), kind, word, block_size: None };
            }
        }
        let moves = self.put_in_place()?;
        Some((self.slot_of(idx)?, moves))
    }

    fn free_slot(&mut self, leads: bool) -> Option<u8> {
        let free = |(at, group): (usize, &Group)| (group.idx.is_none() && (leads || at > 0)).then_some(at);
        let at = match self.0.iter().enumerate().find_map(free) {
            Some(at) => at,
            None if self.0.len() >= MAX_GROUPS => return None,
            None => {
                self.0.push(Group::FREE);
                self.0.len() - 1
            }
        };
        u8::try_from(at).ok()
    }

    /// Slot 0 is for a full-attention group, and is not free while there is one.
    fn put_in_place(&mut self) -> Option<SmallVec<[Move; 2]>> {
        let mut moves = SmallVec::new();
        if self.0[0].idx.is_some() && !self.0[0].leads() {
            let to = self.free_slot(false)?;
            self.go(0, to, &mut moves);
        }
        if self.0[0].idx.is_none()
            && let Some(from) = self.0.iter().position(Group::leads)
        {
            self.go(u8::try_from(from).ok()?, 0, &mut moves);
        }
        Some(moves)
    }

    fn go(&mut self, from: u8, to: u8, moves: &mut SmallVec<[Move; 2]>) {
        self.0.swap(usize::from(from), usize::from(to));
        moves.push((from, to));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const WINDOWED: AttentionKind = AttentionKind::SlidingWindow { window: Some(8) };

    fn tag(idx: u32, kind: Option<AttentionKind>) -> GroupTag {
        GroupTag { idx: Some(idx), kind }
    }

    /// I9: the first full-attention group has slot 0, whatever was assumed or named before.
    #[test]
    fn a_kind_that_is_said_replaces_one_that_was_assumed() {
        let mut groups = Groups::default();
        let (slot, moves) = groups.slot_for_store(GroupTag::default(), true).unwrap();
        assert_eq!((slot, moves.len()), (1, 0));
        let (slot, moves) = groups.slot_for_store(tag(1, Some(AttentionKind::Full)), false).unwrap();
        assert_eq!((slot, moves.len()), (0, 0));
        let (slot, moves) = groups.slot_for_store(tag(0, Some(WINDOWED)), false).unwrap();
        assert_eq!((slot, moves.len()), (1, 0));

        let mut groups = Groups::default();
        assert_eq!(groups.slot_for_store(tag(0, None), false).unwrap().0, 0);
        assert_eq!(groups.slot_for_store(tag(1, None), false).unwrap().0, 1);
        let (slot, moves) = groups.slot_for_store(tag(1, Some(AttentionKind::Full)), false).unwrap();
        assert_eq!((slot, moves.len()), (1, 0), "slot 0 is taken");
        let (slot, moves) = groups.slot_for_store(tag(0, Some(WINDOWED)), false).unwrap();
        assert_eq!(slot, 2);
        assert_eq!(moves.as_slice(), [(0, 2), (1, 0)]);
        assert_eq!(groups.slot_of(1), Some(0));
        let said_first = groups.slot_for_store(tag(1, Some(WINDOWED)), false).unwrap();
        assert_eq!((said_first.0, said_first.1.len()), (0, 0), "what was said first stays for slot 0");
    }
}
