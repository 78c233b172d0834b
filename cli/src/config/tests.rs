use super::*;
use std::collections::HashSet;
use std::io::Write as _;

fn read(text: &str, variables: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Loaded, String> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let variables = variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let given =
        |(path, text): &(&str, &str)| Given { key: keys::find(path).unwrap(), text: (*text).to_owned() };
    let flags: Vec<Given> = flags.iter().map(given).collect();
    let name = file.path().display().to_string();
    Loaded::read(Some(file.path()), variables, &flags, &["master", "node", "client"])
        .map_err(|problems| problems.to_string().replace(&name, "FILE"))
}

#[test]
fn flags_win_over_variables_and_variables_over_the_file() {
    let text = "[master.store]\nlease_ttl_ms = 1\nnode_ttl_ms = 2\n\n[master]\nspin_us = 3\n";
    let variables =
        [("SNOWSKIN_MASTER_STORE_LEASE_TTL_MS", "10"), ("SNOWSKIN_MASTER_STORE_NODE_TTL_MS", "20")];
    let loaded = read(text, &variables, &[("master.store.lease_ttl_ms", "100")]).unwrap();
    let master = &loaded.settings.master;
    assert_eq!((master.store.lease_ttl_ms, master.store.node_ttl_ms, master.spin_us), (100, 20, 3));
    assert_eq!(loaded.origin("master.store.lease_ttl_ms").to_string(), "--lease-ms");
    assert_eq!(loaded.origin("master.store.node_ttl_ms").to_string(), "SNOWSKIN_MASTER_STORE_NODE_TTL_MS");
    assert!(loaded.origin("master.spin_us").to_string().ends_with(".toml:6"));
    assert_eq!(*loaded.origin("master.stall_ms_max"), Origin::Default);
}

#[test]
fn every_mistake_of_a_file_is_named_with_its_line_and_what_to_do() {
    let text = "[master]\nspin_us = \"soon\"\nhttp_listen = 9003\nspinus = 5\n\n[node]\npopulate = 1\n[cheese]\nx = 1\n";
    let error = read(text, &[], &[]).unwrap_err();
    for part in [
        "FILE:2: master.spin_us: invalid type: string \"soon\", expected u32; write a whole number",
        "FILE:3: master.http_listen: ",
        "FILE:4: master.spinus: no such setting; did you mean master.spin_us?",
        "FILE:7: node.populate: invalid type: integer `1`, expected a boolean; write true or false",
        "FILE:8: cheese: no such setting",
        "snowskin config reference",
    ] {
        assert!(error.contains(part), "`{part}` is not in:\n{error}");
    }
}

#[test]
fn what_is_not_toml_is_named_with_its_line() {
    let error = read("[master]\nspin_us = \n", &[], &[]).unwrap_err();
    assert!(error.contains("FILE:2: not TOML"), "{error}");
    let error =
        Loaded::read(Some(Path::new("/no/such.toml")), std::iter::empty(), &[], &[]).unwrap_err().to_string();
    assert!(error.contains("/no/such.toml: cannot be read"), "{error}");
}

#[test]
fn a_value_out_of_its_limits_is_named_where_it_was_given() {
    let error = read("[master.store]\n\nlease_ttl_ms = 0\n", &[], &[]).unwrap_err();
    assert!(
        error.contains("FILE:3: master.store.lease_ttl_ms: 0 is out of its limits: the value must"),
        "{error}"
    );
    let error = read("", &[("SNOWSKIN_NODE_ENGINE_RDMA_QPS", "17")], &[]).unwrap_err();
    assert!(error.contains("SNOWSKIN_NODE_ENGINE_RDMA_QPS: node.engine.rdma.qps: 17"), "{error}");
    let error = read("", &[], &[("client.bounce_bytes", "1KiB")]).unwrap_err();
    assert!(error.contains("--bounce-bytes: client.bounce_bytes: 1024"), "{error}");
}

#[test]
fn sizes_lists_and_none_are_written_as_people_write_them() {
    let text = "[master]\nhttp_listen = \"none\"\n[node]\ncapacity_bytes = \"64GiB\"\nname = \"17\"\n\
                [node.engine]\nfabrics = \"shm,tcp\"\ntopology = { file = \"/t.json\" }\n";
    let variables = [
        ("SNOWSKIN_NODE_ENGINE_RDMA_DEVICES", "[\"mlx5_0\", \"mlx5_1:1\"]"),
        ("SNOWSKIN_NODE_POPULATE", "false"),
    ];
    let loaded = read(text, &variables, &[("client.value_bytes_max", "2MiB")]).unwrap();
    let node = &loaded.settings.node.node;
    assert_eq!(loaded.settings.master.http_listen, None);
    assert_eq!((node.capacity_bytes, node.name.as_str(), node.populate), (64 << 30, "17", false));
    assert_eq!(node.engine.fabrics.to_string(), "shm,tcp");
    assert_eq!(node.engine.topology, te_engine::TopologySource::File("/t.json".into()));
    assert_eq!(node.engine.rdma.devices, ["mlx5_0", "mlx5_1:1"]);
    assert_eq!(loaded.settings.client.value_bytes_max, 2 << 20);
}

#[test]
fn nodes_and_clients_know_the_one_master_of_the_cluster() {
    let loaded = read("", &[("SNOWSKIN_MASTER", "m:1")], &[]).unwrap();
    assert_eq!(loaded.settings.node.node.master.to_string(), "m:1");
    assert_eq!(loaded.settings.client.master.to_string(), "m:1");
}

#[test]
fn a_variable_that_only_looks_like_a_setting_is_told_and_not_refused() {
    let loaded =
        read("", &[("SNOWSKIN_MASTER_SERVICE_HOST", "10.0.0.1"), ("SNOWSKIN_SEED", "1")], &[]).unwrap();
    assert_eq!(loaded.unknown_variables, [("SNOWSKIN_MASTER_SERVICE_HOST".to_owned(), None)]);
}

#[test]
fn a_slip_of_the_pen_in_a_short_variable_is_told_with_what_was_meant() {
    let meant = |name: &str| read("", &[(name, "10.0.0.1:50051")], &[]).unwrap().unknown_variables.pop();
    for (name, near) in [
        ("SNOWSKIN_MASTRE", "SNOWSKIN_MASTER"),
        ("SNOWSKIN_MASTERS", "SNOWSKIN_MASTER"),
        ("SNOWSKIN_TENNANT", "SNOWSKIN_TENANT"),
        ("SNOWSKIN_CONFG", "SNOWSKIN_CONFIG"),
        ("SNOWSKIN_NODE_CAPACITY_BYTE", "SNOWSKIN_NODE_CAPACITY_BYTES"),
    ] {
        assert_eq!(meant(name), Some((name.to_owned(), Some(near))));
    }
    // Variables of other programs, and of single commands.
    for name in ["SNOWSKIN_SEED", "SNOWSKIN_VERSION", "SNOWSKIN_PORT", "SNOWSKIN_QUIET", "SNOWSKIN_LOCAL"] {
        assert_eq!(meant(name), None);
    }
}

#[test]
fn sizes_within_tables_are_written_as_everywhere() {
    let text = "[master.store]\nadmin_secret = \"root\"\nmulti_tenants = true\n\
                [[master.store.tenants]]\nname = \"a\"\nquota_bytes = \"64MiB\"\n";
    let loaded = read(text, &[], &[]).unwrap();
    assert_eq!(loaded.settings.master.store.tenants[0].quota_bytes, Some(64 << 20));
    let problems = read(&text.replace("64MiB", "64 apples"), &[], &[]).unwrap_err().to_string();
    assert!(problems.contains("tenants"), "{problems}");
}

#[test]
fn secrets_are_masked_where_settings_are_shown() {
    let text = "[master.store]\nhash_seed = 77\nadmin_secret = \"sesame\"\nmulti_tenants = true\n\
                [[master.store.tenants]]\nname = \"a\"\nsecret = \"sesame\"\nquota_bytes = 64\n\
                [cluster]\nadmin_secret = \"sesame\"\ntenant_secret = \"sesame\"\n";
    let loaded = read(text, &[], &[]).unwrap();
    let tenant = &loaded.settings.master.store.tenants[0];
    assert!(tenant.secret.matches(b"sesame") && tenant.quota_bytes == Some(64));
    for key in keys::all() {
        assert!(!loaded.shown(key).contains("sesame"), "{}", key.path);
    }
    assert_eq!(loaded.shown(keys::find("master.store.hash_seed").unwrap()), "\"***\"");
    assert_eq!(loaded.settings.master.store.hash_seed, 77);
}

#[test]
fn tenants_without_an_admins_secret_are_refused_where_they_were_asked_for() {
    let text = "[master.store]\n\nmulti_tenants = true\n";
    let error = read(text, &[], &[]).unwrap_err();
    assert!(error.contains("FILE:3: master.store.multi_tenants: true"), "{error}");
    assert!(error.contains("store.admin_secret") && error.contains("--admin-secret"), "{error}");
    read(text, &[], &[("master.store.admin_secret", "sesame")]).unwrap();
}

#[test]
fn every_setting_is_a_leaf_with_documentation_and_names_of_its_own() {
    let mut names = HashSet::new();
    for key in keys::all() {
        let holds_settings = key.default.is_object();
        assert!(!holds_settings, "{}: name the file of `{}` in SOURCES", key.path, key.rust_type);
        assert!(!key.doc.is_empty(), "{} is not documented", key.path);
        assert!(names.insert(key.variable.clone()), "{} is two settings", key.variable);
    }
    fn leaves(value: &Value) -> usize {
        value.as_object().map_or(1, |object| object.values().map(leaves).sum())
    }
    let tree = serde_json::to_value(Settings::default()).unwrap();
    assert_eq!(keys::all().len(), leaves(&tree), "the documentation of a field was not found");
}

#[test]
fn the_reference_page_is_what_the_program_generates() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/config.md");
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(page == reference::page(), "run `cargo xtask reference`, read the diff, and commit it");
}

#[test]
fn a_password_in_a_connection_string_is_used_and_not_shown() {
    let key = keys::find("node.engine.metadata.source").unwrap();
    let url = "redis://u:hunter2@127.0.0.1:1/0";
    // With or without the feature that the URL needs: a refused value is not repeated in the error.
    match read("", &[], &[(key.path.as_str(), url)]) {
        Ok(loaded) => {
            assert_eq!(loaded.shown(key), "\"redis://u:***@127.0.0.1:1/0\"");
            assert_eq!(loaded.settings.node.node.engine.metadata.source, url.parse().unwrap());
        }
        Err(error) => assert!(error.contains("redis") && !error.contains("hunter2"), "{error}"),
    }
    for bad in ["redis://u:hunter2@nowhere", "hunter2"] {
        let error = read("", &[("SNOWSKIN_METADATA", bad)], &[]).unwrap_err();
        assert!(error.contains("etcd://") && !error.contains("hunter2"), "{error}");
    }
}

#[test]
fn secrets_stand_in_files_of_their_own_and_the_master_shares_those_of_the_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let cluster = file("cluster", "sesame\n");
    let loaded = read("", &[("SNOWSKIN_CLUSTER_SECRET_FILE", &cluster)], &[]).unwrap();
    let secret = store_core::Secret::from("sesame".to_owned());
    assert_eq!(loaded.settings.cluster.cluster_secret, secret);
    assert_eq!(loaded.settings.master.store.cluster_secret, secret);
    assert!(loaded.settings.node.node.engine.cluster_secret.is_set());
    assert!(loaded.settings.client.engine.cluster_secret.is_set());
    let shown: String = keys::all().iter().map(|key| loaded.shown(key)).collect();
    assert!(!shown.contains("sesame") && shown.contains(&cluster), "the path is shown, the secret is not");

    // A value of the master's own section is kept.
    let text = "[master.store]\ncluster_secret = \"own\"\n[cluster]\nadmin_secret = \"root\"\n";
    let loaded = read(text, &[("SNOWSKIN_CLUSTER_SECRET", "sesame")], &[]).unwrap();
    assert_eq!(loaded.settings.master.store.cluster_secret, "own".to_owned().into());
    assert_eq!(loaded.settings.master.store.admin_secret, "root".to_owned().into());

    for (path, what) in [
        (file("empty", "\n"), "is empty"),
        (file("long", &"s".repeat(300)), "at most 256 bytes"),
        (dir.path().join("none").display().to_string(), "No such file"),
    ] {
        let refused = read("", &[("SNOWSKIN_ADMIN_SECRET_FILE", &path)], &[]).unwrap_err();
        assert!(refused.contains("SNOWSKIN_ADMIN_SECRET_FILE") && refused.contains(what), "{refused}");
    }
    let both = [("SNOWSKIN_CLUSTER_SECRET", "a"), ("SNOWSKIN_CLUSTER_SECRET_FILE", cluster.as_str())];
    assert!(read("", &both, &[]).unwrap_err().contains("leave one of them out"));
}

/// Containers that share a host name may share process ids too, so the name ends with 32 random bits, not
/// with a counter or a clock.
#[test]
fn nodes_without_a_name_are_called_differently_in_one_and_the_same_process() {
    let names: Vec<String> = (0..16).map(|_| super::process_name()).collect();
    let suffixes: Vec<u32> =
        names.iter().map(|name| u32::from_str_radix(name.rsplit('-').next().unwrap(), 16).unwrap()).collect();
    let distinct: std::collections::BTreeSet<u32> = suffixes.iter().copied().collect();
    assert_eq!(distinct.len(), suffixes.len(), "{names:?}");
    // The chance that 16 random suffixes rise by accident is one in 16!.
    assert!(suffixes.windows(2).any(|pair| pair[0] > pair[1]), "the suffixes only rise: {names:?}");
    // The chance that two consecutive random suffixes share the upper half is one in 2^16; if all of them do,
    // it is a counter.
    assert!(suffixes.windows(2).any(|pair| pair[0] >> 16 != pair[1] >> 16), "{names:?}");
}

/// The flags are part of the command tree, whose soundness `args` tests.
#[test]
fn every_old_name_of_a_setting_is_accepted_in_the_file_and_as_a_variable() {
    for key in keys::all() {
        for old in key.renamed_from.iter().filter(|_| !key.default.is_null() && !key.is_secret()) {
            let (section, name) = old.rsplit_once('.').unwrap();
            let text = format!("[{section}]\n{name} = {}\n", key.default);
            let loaded = read(&text, &[], &[]).unwrap();
            assert!(loaded.is_given(&key.path) && loaded.renamed.len() == 1, "{old}");
            let variable = format!("SNOWSKIN_{}", old.replace('.', "_").to_uppercase());
            let value = key.default.as_str().map_or_else(|| key.default.to_string(), str::to_owned);
            let loaded = read("", &[(&variable, &value)], &[]).unwrap();
            assert!(loaded.is_given(&key.path) && loaded.renamed.len() == 1, "{variable}");
        }
    }
}

#[test]
fn the_new_name_of_a_setting_wins_over_the_old_one_in_the_same_source() {
    let value = |loaded: &Loaded| loaded.settings.node.node.engine.remote_regions_max;
    let (new, old) = ("remote_regions_max = 70\n", "segments_max = 80\n");
    for lines in [[new, old], [old, new]] {
        let loaded = read(&format!("[node.engine]\n{}", lines.concat()), &[], &[]).unwrap();
        assert_eq!((value(&loaded), loaded.renamed.len()), (70, 1), "{lines:?}");
    }
    let new = ("SNOWSKIN_NODE_ENGINE_REMOTE_REGIONS_MAX", "70");
    let old = ("SNOWSKIN_NODE_ENGINE_SEGMENTS_MAX", "80");
    for variables in [[new, old], [old, new]] {
        let loaded = read("", &variables, &[]).unwrap();
        assert_eq!((value(&loaded), loaded.renamed.len()), (70, 1), "{variables:?}");
        assert_eq!(loaded.origin("node.engine.remote_regions_max").to_string(), new.0);
        let warnings = loaded.warnings();
        assert!(warnings.len() == 1 && warnings[0].starts_with(old.0), "{warnings:?}");
    }
    // An old name overrides the source below.
    let loaded = read("[node.engine]\nremote_regions_max = 70\n", &[old], &[]).unwrap();
    assert_eq!(value(&loaded), 80);
}

#[test]
fn the_variable_that_follows_from_the_path_wins_over_the_shorter_one() {
    let (long, short) = (("SNOWSKIN_CLUSTER_MASTER", "a:1"), ("SNOWSKIN_MASTER", "b:1"));
    for variables in [[long, short], [short, long]] {
        let loaded = read("", &variables, &[]).unwrap();
        assert_eq!(loaded.settings.cluster.master.to_string(), "a:1", "{variables:?}");
    }
}

#[test]
fn settings_of_a_fabric_that_this_build_lacks_are_ignored() {
    for entry in te_engine::fabrics() {
        let text = format!(
            "[node.engine.{0}]\nnot_a_setting = 1\n[client.engine]\n{0}.not_a_setting = 1\n",
            entry.name
        );
        let variable = format!("SNOWSKIN_NODE_ENGINE_{}_NOT_A_SETTING", entry.name.to_uppercase());
        let loaded = read(&text, &[(&variable, "1")], &[]);
        assert_eq!(loaded.is_err(), entry.is_built(), "{}", entry.name);
        if let Ok(loaded) = loaded {
            let warnings = loaded.warnings();
            assert_eq!(loaded.not_built.into_iter().collect::<Vec<_>>(), [entry.name], "once");
            assert!(loaded.unknown_variables.is_empty(), "{:?}", loaded.unknown_variables);
            assert!(warnings.len() == 1 && warnings[0].contains(entry.name), "{warnings:?}");
        }
    }
}
