use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::vllm::{Algorithm, ExtraKey, Profile, Release, VllmChain};
use super::*;

fn chain(tokens: &[u32], block_tokens: u32, root: &Root) -> Vec<BlockKey> {
    let mut found = Vec::new();
    keys(tokens, block_tokens, root, &mut found);
    found
}

/// The standard, written out: bytes are assembled one by one.
fn standard(tokens: &[u32], block_tokens: usize, seed: u64) -> Vec<BlockKey> {
    let mut found: Vec<BlockKey> = Vec::new();
    for block in tokens.chunks_exact(block_tokens) {
        let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        let local = xxh3_64_with_seed(&bytes, seed);
        let key = match found.last() {
            None => local,
            Some(before) => {
                let mut pair = before.0.to_le_bytes().to_vec();
                pair.extend_from_slice(&local.to_le_bytes());
                xxh3_64_with_seed(&pair, seed)
            }
        };
        found.push(BlockKey(key));
    }
    found
}

#[test]
fn keys_are_those_that_the_reference_implementation_of_xxh3_gives() {
    // Python: xxhash 4.1.0, xxh3_64_intdigest, over 3 blocks of 4 tokens 0..12.
    let tokens: Vec<u32> = (0..12).collect();
    let seed_0 = [0xa1d0_bd89_3c95_31ac, 0xdb33_494f_f9c2_94ff, 0xeb92_e7b6_e955_eee4].map(BlockKey);
    let seed_1337 = [0x7ee2_cbed_c694_ab46, 0x83fb_702f_20e2_ad65, 0xebe5_8e32_6790_467b].map(BlockKey);
    assert_eq!(chain(&tokens, 4, &Root::new(0)), seed_0);
    assert_eq!(chain(&tokens, 4, &Root::new(1337)), seed_1337);
}

#[test]
fn adapter_and_salt_separate_prompts_with_equal_tokens() {
    let tokens = [7; 32];
    let roots = [
        Root::new(0),
        Root::new(1),
        Root::of(0, Some("a"), None),
        Root::of(0, None, Some("a")),
        Root::of(0, Some("a"), Some("bc")),
        Root::of(0, Some("ab"), Some("c")),
        Root::of(1, Some("a"), None),
    ];
    let mut found: Vec<BlockKey> = roots.iter().flat_map(|root| chain(&tokens, 16, root)).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), 2 * roots.len());
    assert_eq!(Root::of(0, Some(""), None), Root::new(0));
    assert_eq!(Root::of(0, None, None), Root::new(0));
}

#[test]
fn extra_keys_change_a_block_and_all_behind_it() {
    let root = Root::new(0);
    let mut plain = Chain::new(&root);
    let mut with = Chain::new(&root);
    assert_eq!(plain.push(&[1, 2]), with.push_with(&[1, 2], b""));
    assert_ne!(plain.push(&[3, 4]), with.push_with(&[3, 4], b"image"));
    assert_ne!(plain.push(&[5, 6]), with.push(&[5, 6]));
    let mut other = Chain::new(&root);
    other.push(&[1, 2]);
    let mut again = other;
    assert_ne!(other.push_with(&[3, 4], b"image"), again.push_with(&[3, 4], b"other"));
}

#[test]
fn a_rest_of_tokens_has_no_key_and_no_block_size_has_no_blocks() {
    assert_eq!(chain(&[1; 15], 16, &Root::new(0)), []);
    assert_eq!(chain(&[1; 33], 16, &Root::new(0)).len(), 2);
    assert_eq!(chain(&[1; 33], 0, &Root::new(0)), []);
    assert_eq!(Session::new(Root::new(0), 0).turn(&[1; 33]), []);
    let mut found = Vec::new();
    sglang::hashes(&[1; 33], 0, None, &mut found);
    assert_eq!(found, []);
}

#[test]
fn blocks_of_every_algorithm_differ_between_releases_only_where_the_releases_do() {
    let keys = [ExtraKey::Lora { name: "name", path: "path" }];
    for algorithm in Algorithm::ALL {
        let digest = |release: Release, keys: &[ExtraKey<'_>]| {
            let profile = Profile::of(release, algorithm, Some("0")).expect("a seed");
            VllmChain::new(&profile).push(&[1, 2, 3], keys, &[])
        };
        assert_eq!(digest(Release::UpTo28, &[]), digest(Release::From31, &[]));
        assert_eq!(digest(Release::UpTo28, &keys), digest(Release::From29, &keys));
        assert_ne!(digest(Release::From29, &keys), digest(Release::From31, &keys));
    }
}

#[test]
fn a_root_that_is_random_has_no_profile() {
    for algorithm in Algorithm::ALL {
        assert_eq!(Profile::of(Release::UpTo28, algorithm, None), None);
    }
    for release in [Release::From29, Release::From31] {
        assert!(Profile::of(release, Algorithm::Sha256, None).is_some());
        assert!(Profile::of(release, Algorithm::Sha256Cbor, None).is_some());
        assert_eq!(Profile::of(release, Algorithm::Xxhash, None), None);
        assert_eq!(Profile::of(release, Algorithm::XxhashCbor, None), None);
    }
}

#[test]
fn blocks_that_wait_for_the_tokens_behind_them_have_no_hash_yet() {
    let mut profile = Profile::of(Release::From31, Algorithm::Sha256, None).expect("a seed");
    let tokens: Vec<u32> = (0..32).collect();
    let mut found = vec![];
    vllm::hashes(&profile, &tokens, 16, None, None, &mut found);
    assert_eq!(found.len(), 2);
    found.clear();
    profile.lookahead_tokens = 1;
    vllm::hashes(&profile, &tokens, 16, None, None, &mut found);
    assert_eq!(found.len(), 1);
}

proptest! {
    #[test]
    fn keys_follow_the_standard(
        tokens in prop::collection::vec(any::<u32>(), 0..200),
        block_tokens in 1..40_u32,
        seed in any::<u64>(),
    ) {
        let found = chain(&tokens, block_tokens, &Root::new(seed));
        prop_assert_eq!(found, standard(&tokens, block_tokens as usize, seed));
    }

    #[test]
    fn a_chain_can_be_continued_behind_any_block(
        tokens in prop::collection::vec(any::<u32>(), 64),
        cut in 1..15_usize,
        salted in any::<bool>(),
    ) {
        let root = Root::of(5, None, salted.then_some("salt"));
        let whole = chain(&tokens, 4, &root);
        let mut found = whole[..cut].to_vec();
        extend(&mut Chain::after(5, whole[cut - 1]), &tokens[cut * 4..], 4, &mut found);
        prop_assert_eq!(found, whole);
    }

    /// Turns that extend, repeat, cut and change what was there.
    #[test]
    fn a_session_gives_the_keys_of_each_turn(
        turns in prop::collection::vec(prop::collection::vec(0..3_u32, 0..40), 1..8),
        block_tokens in 1..5_u32,
    ) {
        let root = Root::of(0, Some("adapter"), None);
        let mut session = Session::new(root, block_tokens);
        for tokens in turns {
            prop_assert_eq!(session.turn(&tokens), chain(&tokens, block_tokens, &root));
        }
    }
}
