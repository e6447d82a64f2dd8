// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cilium/ebpf"

	"instar/internal/capset"
	"instar/internal/kernel"
)

// NoSkipEnv is the variable of the environment that, set to 1, turns the skips
// of this package into failures.
const NoSkipEnv = "INSTAR_TEST_NO_SKIP"

// Skip skips the test, or fails it where NoSkipEnv says so. It is for what an
// environment lacks.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv(NoSkipEnv) == "1" {
		t.Fatalf("may not be skipped with "+NoSkipEnv+"=1: "+format, args...)
	}
	t.Skipf(format, args...)
}

// Need skips the test unless the calling thread has all of caps.
func Need(t testing.TB, caps ...capset.Cap) {
	t.Helper()
	have, err := capset.Effective()
	if err != nil {
		t.Fatal(err)
	}
	if missing := have.Missing(caps...); len(missing) > 0 {
		Skip(t, "needs %s: run as root", capset.Names(missing))
	}
}

// NeedRoot skips the test unless it runs as root with what the tests of this
// module do as root: namespaces, mounts, network devices, eBPF, other users.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs user 0: run as root")
	}
	Need(t, capset.SysAdmin, capset.NetAdmin, capset.BPF, capset.Perfmon,
		capset.SetUID, capset.SetGID, capset.Cap(unix.CAP_SETPCAP), capset.Kill,
		capset.Chown, capset.DACOverride)
}

// NeedCommand skips the test unless the command is installed, and returns its
// path. The name of the package that has it is for the message.
func NeedCommand(t testing.TB, command, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(command)
	if err != nil {
		Skip(t, "needs the command %s: install the package %s", command, pkg)
	}
	return path
}

// Since skips the test on kernels older than v, which cannot do what.
func Since(t testing.TB, v kernel.Version, what string) {
	t.Helper()
	running, err := kernel.Current()
	if err != nil {
		t.Fatal(err)
	}
	if !running.AtLeast(v) {
		t.Skipf("kernel %v is older than %v: %s", running, v, what)
	}
}

// SkipIfNotSupported skips the test when err wraps ebpf.ErrNotSupported or
// errors.ErrUnsupported and the kernel is older than since. On a kernel that
// has to support it the test fails. It returns when err is anything else, nil
// included.
func SkipIfNotSupported(t testing.TB, err error, since kernel.Version) {
	t.Helper()
	if !errors.Is(err, ebpf.ErrNotSupported) && !errors.Is(err, errors.ErrUnsupported) {
		return
	}
	running, kerr := kernel.Current()
	if kerr != nil {
		t.Fatal(kerr)
	}
	if running.AtLeast(since) {
		t.Fatalf("kernel %v has to support this (since %v): %v", running, since, err)
	}
	t.Skipf("kernel %v is older than %v: %v", running, since, err)
}
