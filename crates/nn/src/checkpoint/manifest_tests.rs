use super::*;

/// A manifest of two files and a tensor in both of them, one part in two pieces.
pub fn small() -> Manifest {
    let hex = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    let file = |i: u64| FileEntry {
        name: format!("rank-{i:05}.safetensors"),
        bytes: 256,
        header_bytes: 128,
        header_blake3: hex("header"),
    };
    let part = |file, pieces: &[[u64; 4]]| Part {
        file,
        offset: 128,
        pieces: pieces.to_vec(),
        blake3: vec![hex("v")],
    };
    let parts = vec![part(0, &[[0, 2, 0, 4], [3, 4, 0, 4]]), part(1, &[[2, 3, 0, 4]])];
    let AdamW { lr, .. } = AdamW::default();
    Manifest {
        version: VERSION,
        tilewire: "0.1.0".to_owned(),
        step: 3,
        run: Run {
            seed: 1,
            model: ModelCfg::default(),
            dtype: "f32".to_owned(),
            grid: Grid { dp: 2, cp: 1, tp: 1 },
            optim: Optim { lr: lr / 3.0, ..AdamW::default().into() },
            data: DataId { task: "copy".to_owned(), bytes: 0, blake3: String::new() },
        },
        block_bytes: BLOCK,
        files: vec![file(0), file(1)],
        tensors: vec![TensorEntry { name: "layers.0.qkv.w".to_owned(), shape: [4, 4], parts }],
    }
}

/// The text of a file with any value, under its digest.
fn sealed(value: &[u8]) -> Vec<u8> {
    let digest = blake3::hash(value).to_hex();
    [BEFORE.as_bytes(), digest.as_bytes(), BETWEEN.as_bytes(), value, AFTER.as_bytes()].concat()
}

fn checked(bytes: &[u8]) -> Result<Manifest, String> {
    let m = open(bytes)?;
    m.check().map(|()| m)
}

/// Asserts all that readers take for granted of a manifest that has been checked.
fn trusted(m: &Manifest) {
    let mut sum = 0u64;
    for f in &m.files {
        sum = sum.checked_add(f.bytes).expect("the sum of all files");
        assert!(f.header_bytes <= f.bytes);
    }
    for t in &m.tensors {
        let [rows, cols] = t.shape.map(|n| n as usize);
        let small = rows * cols <= 1 << 10;
        let mut seen = vec![false; if small { rows * cols } else { 0 }];
        for p in &t.parts {
            let num = p.num_values();
            assert_eq!(p.blake3.len() as u64, (4 * num).div_ceil(BLOCK));
            assert!(p.offset + 4 * num <= m.files[p.file].bytes);
            let sizes = p.pieces().map(|q| q.rows.len() as u64 * q.cols.len() as u64);
            assert_eq!(sizes.sum::<u64>(), num);
            for q in p.pieces().filter(|_| small) {
                for i in q.rows.flat_map(|r| q.cols.clone().map(move |c| r * cols + c)) {
                    assert!(!std::mem::replace(&mut seen[i], true), "{}: {i} is twice", t.name);
                }
            }
        }
        assert!(seen.iter().all(|s| *s), "{}: an element is nowhere", t.name);
    }
}

fn accepted(bytes: &[u8]) -> bool {
    let Ok(m) = checked(bytes) else { return false };
    trusted(&m);
    let again = checked(seal(&m).unwrap().as_bytes());
    assert_eq!(again.as_ref(), Ok(&m), "what is written is what was read");
    true
}

#[test]
fn fuzz_manifest() {
    let text = seal(&small()).unwrap();
    let seeds = vec![text.clone().into_bytes(), sealed(b"{\"version\": 1}")];
    tilewire_testing::fuzz!("manifest", seeds, accepted);
}

/// As the one above, with a good digest of what was changed.
#[test]
fn fuzz_manifest_value() {
    let value = |m: &Manifest| serde_json::to_vec(m).unwrap();
    let mut wide = small();
    wide.tensors[0].shape = [1 << 20, 1 << 9];
    let blocks = (4u64 << 29).div_ceil(BLOCK) as usize;
    wide.tensors[0].parts = vec![Part {
        file: 1,
        offset: 128,
        pieces: vec![[0, 1 << 20, 0, 1 << 9]],
        blake3: vec![String::new(); blocks],
    }];
    wide.files[1].bytes = 1 << 40;
    tilewire_testing::fuzz!("manifest_value", vec![value(&small()), value(&wide)], |value| {
        accepted(&sealed(value))
    });
}

#[test]
fn files_whose_lengths_have_no_sum_are_refused() {
    let mut m = small();
    m.files[0].bytes = u64::MAX;
    assert!(m.check().unwrap_err().contains("more bytes"));
}

/// As many elements as there are: row 2 twice, and row 3 nowhere. A reader would take what its
/// buffer held for row 3.
#[test]
fn pieces_that_overlap_are_refused() {
    let mut m = small();
    assert_eq!(m.check(), Ok(()));
    m.tensors[0].parts[1].pieces = vec![[1, 2, 0, 4]];
    assert_eq!(
        m.check().unwrap_err(),
        "layers.0.qkv.w: pieces [0, 2, 0, 4] and [1, 2, 0, 4] overlap"
    );
    // Side by side they do not.
    m.tensors[0].parts[0].pieces = vec![[0, 4, 0, 1], [0, 2, 1, 4], [2, 3, 1, 4]];
    m.tensors[0].parts[1].pieces = vec![[3, 4, 1, 4]];
    m.tensors[0].parts[1].blake3 = vec![String::new()];
    assert_eq!(m.check(), Ok(()));
    m.tensors[0].parts[1].pieces = vec![[1, 2, 0, 3]];
    assert!(m.check().unwrap_err().contains("overlap"));
}

/// A resumed run would say that its optimizer is another.
#[test]
fn numbers_are_read_as_they_were_written() {
    let mut m = small();
    m.run.optim.eps = 1e-289;
    assert_eq!(open(seal(&m).unwrap().as_bytes()).unwrap().run.optim.eps, 1e-289);
}

#[test]
fn another_version_of_the_format_is_refused_by_its_number() {
    let mut value = serde_json::to_value(small()).unwrap();
    value["version"] = (VERSION + 1).into();
    // Whatever else that version may have.
    value["run"] = serde_json::Value::Null;
    let e = checked(&sealed(value.to_string().as_bytes())).unwrap_err();
    let want = format!("version {}, and this program reads version {VERSION}", VERSION + 1);
    assert!(e.contains(&want), "{e}");
}
