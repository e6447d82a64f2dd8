// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// options say how much is measured.
type options struct {
	json bool
	// rounds of sending packets to each program.
	rounds, packets int
	// throughputRounds compare the receivers.
	throughputRounds int
	// flips and repeats of the other operations.
	flips, repeats int
}

func main() { os.Exit(run(os.Args[1:])) }

// run returns the exit code: 0, 1 when measuring went wrong, 2 when it could not be
// started.
func run(args []string) int {
	o, err := parse(args, os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2
	}
	// Whatever is open when the process ends is closed by the kernel: the counting
	// of run times, which the whole machine pays for, stops with the process.
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	root, leave, err := enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 2
	}
	r, err := measure(ctx, root, o)
	if err = errors.Join(err, leave()); err == nil {
		err = o.print(os.Stdout, r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func parse(args []string, usage io.Writer) (o options, err error) {
	f := flag.NewFlagSet("scripts/bench", flag.ContinueOnError)
	f.SetOutput(usage)
	f.Usage = func() {
		fmt.Fprintln(usage, "usage: scripts/bench [FLAGS]\n\nMeasures what Instar costs on this machine, as root. Takes less than a minute\n"+
			"where nothing else runs.")
		f.PrintDefaults()
	}
	f.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	f.IntVar(&o.rounds, "rounds", 200, "rounds of packets to each program")
	f.IntVar(&o.packets, "packets", 640, fmt.Sprintf("packets of each kind in a round, a multiple of %d", batchSize))
	f.IntVar(&o.throughputRounds, "throughput-rounds", 20, "rounds that compare throughput")
	f.IntVar(&o.flips, "flips", 5000, "activations to time")
	f.IntVar(&o.repeats, "repeats", 100, "times that each other operation is timed")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 || o.rounds < 1 || o.packets < batchSize || o.packets%batchSize != 0 ||
		o.throughputRounds < 1 || o.flips < 2 || o.repeats < 1 {
		f.Usage()
		return o, errors.New("invalid arguments")
	}
	return o, nil
}

// measure does everything, with groups below root.
func measure(ctx context.Context, root string, o options) (r Report, err error) {
	r.Version = reportVersion
	if r.Machine, err = machine(); err != nil {
		return r, err
	}
	if r.Programs, err = measurePrograms(); err != nil {
		return r, err
	}
	if r.PacketCosts, err = costs(ctx, root, o.rounds, o.packets); err != nil {
		return r, err
	}
	if r.Throughputs, err = throughputs(ctx, root, o.throughputRounds); err != nil {
		return r, err
	}
	if r.Operations, err = operations(ctx, root, o.flips, o.repeats); err != nil {
		return r, err
	}
	if r.Machine.LoadEnd, err = load(); err != nil {
		return r, err
	}
	r.remark()
	return r, nil
}

func (o options) print(out io.Writer, r Report) error {
	if !o.json {
		return r.write(out)
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// enter makes the network and mount namespaces that scripts/bench has put this process
// into ready: the loopback device up, and a bpffs with the folder for the groups. leave
// undoes it.
func enter() (root string, leave func() error, err error) {
	if os.Geteuid() != 0 {
		return "", nil, errors.New("programs can be loaded by root only: run it as root")
	}
	for _, ns := range []string{"net", "mnt"} {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return "", nil, fmt.Errorf("read namespace: %w", err)
		}
		parents, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", os.Getppid(), ns))
		if err != nil || mine == parents {
			return "", nil, fmt.Errorf("no %s namespace of its own: start it with scripts/bench", ns)
		}
	}
	if err := upLoopback(); err != nil {
		return "", nil, fmt.Errorf("bring lo up: %w", err)
	}
	dir, err := os.MkdirTemp("", "instar-bench-")
	if err != nil {
		return "", nil, err
	}
	if err := unix.Mount("instar-bench", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return "", nil, errors.Join(fmt.Errorf("mount a bpffs: %w", err), os.Remove(dir))
	}
	return filepath.Join(dir, "instar"), func() error {
		return errors.Join(os.NewSyscallError("unmount bpffs", unix.Unmount(dir, unix.MNT_DETACH)), os.Remove(dir))
	}, nil
}

func upLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	req, err := unix.NewIfreq("lo")
	if err == nil {
		req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		err = os.NewSyscallError("ioctl SIOCSIFFLAGS", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req))
	}
	return errors.Join(err, os.NewSyscallError("close", unix.Close(fd)))
}
