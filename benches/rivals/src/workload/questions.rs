//! Prompts to ask for, by class.

use super::Workload;
use super::blocks::BlockId;
use super::fleet::Fleet;
use crate::dice::Dice;

/// A prompt and its hashes.
#[derive(Clone, Debug)]
pub struct Question {
    /// Its blocks.
    pub path: Vec<BlockId>,
    /// Their content hashes.
    pub locals: Vec<u64>,
    /// Their sequence hashes.
    pub sequences: Vec<u64>,
}

impl Question {
    /// The question for this path.
    pub fn new(fleet: &Fleet, path: Vec<BlockId>) -> Self {
        let locals = path.iter().map(|&block| fleet.blocks.local(block)).collect();
        let sequences = path.iter().map(|&block| fleet.blocks.sequence(block)).collect();
        Self { path, locals, sequences }
    }
}

/// Questions of one kind.
#[derive(Debug)]
pub struct Class {
    /// As reports call it.
    pub name: &'static str,
    /// In a random order.
    pub questions: Vec<Question>,
}

/// `count` questions of every class that the workload has prompts for.
pub fn classes(workload: &mut Workload, count: usize, seed: u64) -> Vec<Class> {
    let mut dice = Dice::new(seed);
    let mut classes = Vec::new();
    let mut push = |name, paths: Vec<Vec<BlockId>>, workload: &Workload| {
        if !paths.is_empty() {
            let questions = paths.into_iter().map(|path| Question::new(workload.fleet(), path)).collect();
            classes.push(Class { name, questions });
        }
    };
    for (name, depth) in [("hit64", 64), ("hit512", 512), ("hit2048", 2_048)] {
        let paths = hits(workload, depth, count, &mut dice);
        push(name, paths, workload);
    }
    let paths = turns(workload, count, &mut dice);
    push("turn", paths, workload);
    let paths = (0..count).map(|_| unknown(workload, Vec::new(), 512)).collect();
    push("miss0", paths, workload);
    if let Workload::Traffic(traffic) = workload {
        let prompts = traffic.system_prompts.clone();
        let hot = traffic.hot.clone();
        let paths = (0..count)
            .map(|_| {
                let prompt = prompts[dice.below(prompts.len())].clone();
                let more = 512_usize.saturating_sub(prompt.len()).max(1);
                unknown(workload, prompt, more)
            })
            .collect();
        push("sysmiss512", paths, workload);
        for (name, at) in [("wide512", 1), ("wide2048", 2), ("staggered2048", 3), ("staggered512", 4)] {
            let paths = (0..count)
                .map(|_| {
                    let more = dice.below(8);
                    unknown(workload, hot[at].path.clone(), more)
                })
                .collect();
            push(name, paths, workload);
        }
    }
    classes
}

/// The first `depth` blocks of prompts that some rank holds that far.
fn hits(workload: &Workload, depth: usize, count: usize, dice: &mut Dice) -> Vec<Vec<BlockId>> {
    let fleet = workload.fleet();
    let mut held: Vec<&[BlockId]> = workload.live();
    held.retain(|path| path.len() >= depth);
    dice.shuffle(&mut held);
    let mut paths: Vec<Vec<BlockId>> = Vec::new();
    for path in held {
        let path = &path[..depth];
        if paths.len() < count && (0..fleet.ranks()).any(|rank| fleet.reach(rank, path) as usize == depth) {
            paths.push(path.to_vec());
        }
    }
    fill_up(paths, count, dice)
}

/// Whole conversations and a few new blocks.
fn turns(workload: &mut Workload, count: usize, dice: &mut Dice) -> Vec<Vec<BlockId>> {
    let mut paths: Vec<Vec<BlockId>> =
        workload.live().into_iter().filter(|path| !path.is_empty()).map(<[_]>::to_vec).collect();
    dice.shuffle(&mut paths);
    paths.truncate(count);
    for path in &mut paths {
        let more = dice.within(2, 32);
        workload.fleet_mut().blocks.extend(path, more);
    }
    fill_up(paths, count, dice)
}

fn unknown(workload: &mut Workload, mut path: Vec<BlockId>, more: usize) -> Vec<BlockId> {
    workload.fleet_mut().blocks.extend(&mut path, more);
    path
}

/// Repeats questions at random where there are not enough of them.
fn fill_up(mut paths: Vec<Vec<BlockId>>, count: usize, dice: &mut Dice) -> Vec<Vec<BlockId>> {
    let distinct = paths.len();
    while distinct > 0 && paths.len() < count {
        paths.push(paths[dice.below(distinct)].clone());
    }
    dice.shuffle(&mut paths);
    paths
}
