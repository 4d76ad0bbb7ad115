use tilewire_core::ErrorKind;

use super::*;

fn run(flags: &Flags, vars: &str) -> Result<Place> {
    let pairs = vars.split_whitespace().filter_map(|v| v.split_once('='));
    detect(flags, &pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
}

fn ambient() -> Flags {
    Flags { parent_pid: Some(77), uid: 1000, ..Flags::default() }
}

/// Variables; rank, size, local rank, local size; launcher; rendezvous; job.
type Row = (&'static str, [usize; 4], Launcher, Rendezvous, &'static str);

fn own_and_torch() -> Vec<Row> {
    use Launcher as L;
    use Rendezvous as R;
    let tcp = |h: &str, p| R::Tcp(h.to_owned(), p);
    let agent = R::TorchStore("h".to_owned(), 29500);
    let torch =
        "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500";
    let elastic: &'static str =
        Box::leak(format!("{torch} TORCHELASTIC_RUN_ID=x").into_boxed_str());
    let restarted: &'static str =
        Box::leak(format!("{elastic} TORCHELASTIC_RESTART_COUNT=2").into_boxed_str());
    let no_agent: &'static str =
        Box::leak(format!("{elastic} TORCHELASTIC_USE_AGENT_STORE=False").into_boxed_str());
    vec![
        ("PATH=/bin", [0, 1, 0, 1], L::Single, R::Solo, "solo"),
        (
            "TILEWIRE_RANK=1/4@127.0.0.1:7000",
            [1, 4, 1, 4],
            L::Tilewire,
            tcp("127.0.0.1", 7000),
            "tcp-127.0.0.1-7000",
        ),
        (
            "TILEWIRE_RANK=0/2@[::1]:7000 RANK=9",
            [0, 2, 0, 2],
            L::Tilewire,
            tcp("::1", 7000),
            "tcp-__1-7000",
        ),
        ("TILEWIRE_RANK=0/1@a:1", [0, 1, 0, 1], L::Tilewire, R::Solo, "tcp-a-1"),
        (torch, [3, 8, 1, 2], L::Torchrun, tcp("h", 29501), "torchrun-none-29500-0"),
        (elastic, [3, 8, 1, 2], L::Torchrun, agent.clone(), "torchrun-x-29500-0"),
        (restarted, [3, 8, 1, 2], L::Torchrun, agent, "torchrun-x-29500-2"),
        (no_agent, [3, 8, 1, 2], L::Torchrun, tcp("h", 29501), "torchrun-x-29500-0"),
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", [0, 1, 0, 1], L::Torchrun, R::Solo, "solo"),
    ]
}

fn mpi_and_slurm() -> Vec<Row> {
    use Launcher as L;
    use Rendezvous as R;
    let tcp = |h: &str, p| R::Tcp(h.to_owned(), p);
    let unix = |n: &str| R::Unix(n.to_owned());
    vec![
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_ess_base_jobid=42 PMIX_RANK=1",
            [1, 2, 1, 2],
            L::OpenMpi,
            unix("tilewire-store-1000-ompi-42"),
            "ompi-42",
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=a/b@1 MASTER_ADDR=n0",
            [3, 4, 1, 2],
            L::OpenMpi,
            tcp("n0", 29501),
            "ompi-a_b_1",
        ),
        (
            "PMI_RANK=2 PMI_SIZE=3",
            [2, 3, 2, 3],
            L::Mpich,
            unix("tilewire-store-1000-mpich-parent77"),
            "mpich-parent77",
        ),
        (
            "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2",
            [2, 4, 0, 2],
            L::Mpich,
            unix("tilewire-store-1000-mpich-parent77"),
            "mpich-parent77",
        ),
        (
            "PMIX_RANK=1 PMIX_SIZE=2 PMIX_NAMESPACE=n",
            [1, 2, 1, 2],
            L::Pmix,
            unix("tilewire-store-1000-pmix-n"),
            "pmix-n",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_JOB_ID=9 SLURM_STEP_ID=3 SLURM_NNODES=1",
            [1, 2, 1, 2],
            L::Slurm,
            unix("tilewire-store-1000-slurm-9.3"),
            "slurm-9.3",
        ),
        (
            "SLURM_PROCID=5 SLURM_NTASKS=99 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=9 \
             SLURM_STEP_ID=0 SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=4 MASTER_ADDR=n MASTER_PORT=5",
            [5, 8, 1, 4],
            L::Slurm,
            tcp("n", 6),
            "slurm-9.0",
        ),
        // A batch script is not a task of a step.
        (
            "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_JOB_ID=9",
            [0, 1, 0, 1],
            L::Single,
            R::Solo,
            "solo",
        ),
    ]
}

#[test]
fn every_launcher() {
    for (vars, [rank, size, local_rank, local_size], launcher, rendezvous, job) in
        own_and_torch().into_iter().chain(mpi_and_slurm())
    {
        let got = run(&ambient(), vars).unwrap_or_else(|e| panic!("{vars}: {e}"));
        let want = Place {
            rank: Rank::new(rank as u32),
            size,
            local_rank: Rank::new(local_rank as u32),
            local_size,
            launcher,
            rendezvous,
            job: job.to_owned(),
        };
        assert_eq!(got, want, "{vars}");
    }
}

#[test]
fn half_set_contradictory_and_garbled_variables_are_named() {
    let ompi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0";
    let rows = [
        ("RANK=0", "WORLD_SIZE"),
        ("WORLD_SIZE=2 LOCAL_RANK=0", "RANK is not"),
        ("RANK=0 WORLD_SIZE=2", "LOCAL_RANK"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h", "MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=65535", "MASTER_PORT=65535"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1", "RANK=2 and WORLD_SIZE=2"),
        ("RANK=x WORLD_SIZE=2 LOCAL_RANK=0", "RANK=`x` is not a number"),
        ("TILEWIRE_RANK=0/2@[[]::1[[]::1]]:7000", "is not host:port"),
        ("RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0", "RANK=`-1`"),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1",
            "LOCAL_RANK=2",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=1",
            "LOCAL_WORLD_SIZE=3",
        ),
        ("TILEWIRE_RANK=3", "rank/size@host:port"),
        ("TILEWIRE_RANK=0/2@host", "host:port"),
        ("TILEWIRE_RANK=2/2@h:1", "TILEWIRE_RANK=2"),
        ("TILEWIRE_RANK=0/0@h:1", "contradict"),
        ("TILEWIRE_RANK=0/99@h:1", "at most 64"),
        (ompi, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK"),
        ("PMI_RANK=0", "PMI_SIZE"),
        ("PMI_RANK=0 PMI_SIZE=4 MPI_LOCALNRANKS=2", "local rank is not known"),
        ("PMIX_RANK=0", "PMIX_SIZE"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_JOB_ID=1", "SLURM_NTASKS"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_JOB_ID=1", "SLURM_LOCALID"),
        (
            "SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=1 SLURM_NNODES=2",
            "SLURM_NTASKS_PER_NODE",
        ),
    ];
    for (vars, needle) in rows {
        let e = run(&ambient(), vars).expect_err(vars);
        assert_eq!(e.kind(), ErrorKind::Config, "{vars}");
        assert!(e.to_string().contains(needle), "{vars}: {e}");
    }
}

#[test]
fn flags_come_first_and_must_be_complete() {
    let vars = "TILEWIRE_RANK=1/4@127.0.0.1:7000";
    let f = Flags { rank: Some(0), size: Some(2), store: Some("h:5".into()), ..ambient() };
    let p = run(&f, vars).unwrap();
    assert_eq!((p.launcher, p.size), (Launcher::Flags, 2));
    assert_eq!(p.rendezvous, Rendezvous::Tcp("h".into(), 5));
    let named = Flags { job: Some("mine".into()), ..f.clone() };
    assert_eq!(run(&named, vars).unwrap().job, "mine");
    for bad in [
        Flags { size: None, ..f.clone() },
        Flags { rank: None, ..f.clone() },
        Flags { store: None, ..f.clone() },
        Flags { store: Some("h:0".into()), ..f.clone() },
        Flags { rank: Some(2), ..f },
    ] {
        assert_eq!(run(&bad, vars).unwrap_err().kind(), ErrorKind::Config, "{bad:?}");
    }
    let nameless = Flags { parent_pid: None, ..Flags::default() };
    assert!(run(&nameless, "PMI_RANK=0 PMI_SIZE=2").is_err());
}
