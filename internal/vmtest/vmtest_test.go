// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"instar/internal/debian"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

func TestNewestOf(t *testing.T) {
	packages := []string{
		"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-57-cloud-amd64", "linux-image-6.1.0-57-cloud-amd64-unsigned",
		"linux-image-6.1.0-58-amd64", "linux-image-6.1.0-58-cloud-arm64", "linux-image-6.12.9+deb13-cloud-amd64",
		"linux-image-6.12.10+deb13-cloud-amd64", "linux-image-7.3.4+deb13-cloud-amd64", "linux-image-7.3.4+deb13-cloud-amd64-dbg",
		"linux-image-cloud-amd64", "linux-headers-6.1.0-60-cloud-amd64",
	}
	for series, want := range map[string]string{
		"6.1":  "6.1.0-57-cloud-amd64",
		"6.12": "6.12.10+deb13-cloud-amd64",
		"7.3":  "7.3.4+deb13-cloud-amd64",
		Newest: "7.3.4+deb13-cloud-amd64",
		"5.10": "",
	} {
		if got, ok := newestOf(series, packages); got != want || ok != (want != "") {
			t.Errorf("%s: %q, %t; want %q", series, got, ok, want)
		}
	}
}

func TestSuiteOf(t *testing.T) {
	for series, want := range map[string]debian.Suite{
		"5.10": "bullseye-security", "6.1": "bookworm-security", "6.12": "trixie-security",
		"6.18": "trixie-backports", "7.3": "trixie-backports", Newest: "trixie-backports",
	} {
		if got := suiteOf(series); got != want {
			t.Errorf("%s: %s, want %s", series, got, want)
		}
	}
	if _, err := Find(t.Context(), nil, "bookworm"); err == nil || !strings.Contains(err.Error(), "5.10, 6.1") {
		t.Errorf("%v, want an error with the series", err)
	}
}

func TestPackagesOf(t *testing.T) {
	names := []string{"linux-image-7.3-cloud-amd64", "linux-binary-7.3-cloud-amd64", "linux-modules-7.3-cloud-amd64", "linux-image-6.1-cloud-amd64", "linux-modules-7.3-cloud-amd64-dbg"}
	for release, want := range map[string][]string{
		"7.3-cloud-amd64": {names[0], names[1], names[2]},
		"6.1-cloud-amd64": {names[3]},
	} {
		if got := packagesOf(release, names); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", release, got, want)
		}
	}
}

// The archive is unpacked by cpio.
func TestArchive(t *testing.T) {
	testutil.NeedCommand(t, "cpio", "cpio")
	source := t.TempDir()
	for name, text := range map[string]string{"one": "1", "sub/two": "two", "sub/empty": ""} {
		file := filepath.Join(source, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../one", filepath.Join(source, "sub", "link")); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	a := newArchive(&b)
	a.text("/etc/deep/file", "text")
	a.text("etc/deep/file", "not twice")
	a.folder("/empty")
	if err := errors.Join(a.tree("/tree", source), a.file("program", filepath.Join(source, "sub", "link")), a.close()); err != nil {
		t.Fatal(err)
	}
	if b.Len()%4 != 0 {
		t.Errorf("it has %d bytes, no multiple of four", b.Len())
	}
	into := t.TempDir()
	cmd := exec.Command("cpio", "--extract", "--make-directories", "--quiet", "--no-preserve-owner")
	cmd.Dir, cmd.Stdin = into, &b
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	var got []string
	err := filepath.WalkDir(into, func(file string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(into, file)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(file)
		got = append(got, name+" "+info.Mode().String()+" "+string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"etc/deep/file -rw-r--r-- text", "program -rw-r----- 1", "tree/one -rw-r----- 1",
		"tree/sub/empty -rw-r----- ", "tree/sub/link Lrwxrwxrwx 1", "tree/sub/two -rw-r----- two",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if info, err := os.Stat(filepath.Join(into, "empty")); err != nil || !info.IsDir() {
		t.Errorf("no empty folder: %v", err)
	}
}

func TestArchiveErrors(t *testing.T) {
	a := newArchive(io.Discard)
	if err := a.file("x", t.TempDir()); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("a folder as a file: %v", err)
	}
	if err := a.tree("x", "/does/not/exist"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	if err := a.entry("short", 0, 0, 0, 5, strings.NewReader("four")); err == nil {
		t.Error("a file that was cut off is no error")
	}
	if err := a.close(); err == nil {
		t.Error("the error is forgotten")
	}
}

func TestLibraries(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for program, want := range map[string][]string{
		"/bin/true": {"ld-linux-x86-64.so.2", "libc.so.6"},
		script:      nil,
	} {
		files, err := libraries(program)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range files {
			if _, err := os.Stat(f); err != nil {
				t.Error(err)
			}
			got = append(got, filepath.Base(f))
		}
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", program, got, want)
		}
	}
}

func TestTestdata(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"a/testdata/deep/testdata", "a/b/testdata", ".git/testdata", "c/examples", "examples/x"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Testdata(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got["/src/examples"] != filepath.Join(root, "examples") || got["/src/a/testdata"] != filepath.Join(root, "a/testdata") || got["/src/a/b/testdata"] != filepath.Join(root, "a/b/testdata") {
		t.Errorf("%v", got)
	}
}

func TestArguments(t *testing.T) {
	h := hardware{memory: 512, cpus: 3, append: "extra words"}
	for with, want := range map[acceleration]string{kvm: "-accel kvm -cpu host -smp 3", tcg: "-smp 1"} {
		got := strings.Join(h.arguments(with, "IMAGE", "INITRAMFS", "CONSOLE", "STATUS"), " ")
		for _, want := range []string{want, "-m 512 ", "-kernel IMAGE", "-initrd INITRAMFS", "panic=-1 oops=panic", " extra words", "file:CONSOLE", "file:STATUS"} {
			if !strings.Contains(got, want) {
				t.Errorf("%s: no %q in %s", with, want, got)
			}
		}
	}
}

func TestTail(t *testing.T) {
	if got := tail([]byte("a\r\nb\r\n")); got != "a\nb\n" {
		t.Errorf("%q", got)
	}
	if got := tail(bytes.Repeat([]byte("x"), 2*consoleTail)); len(got) != consoleTail {
		t.Errorf("%d bytes", len(got))
	}
}

// One machine after the other: programs that end in each way, and a kernel that does.
func TestMachine(t *testing.T) {
	testutil.NeedCommand(t, qemu, "qemu-system-x86")
	testutil.NeedCommand(t, "xz", "xz-utils")
	if testing.Short() {
		t.Skip("too slow for -short: boots virtual machines")
	}
	store, err := debian.OpenStore(testLog{t})
	if err != nil {
		t.Fatal(err)
	}
	kernel, err := Find(t.Context(), store, "6.1")
	if err != nil {
		t.Fatal(err)
	}
	if err := kernel.Fetch(t.Context(), store); err != nil {
		t.Fatal(err)
	}
	guest, err := BuildGuest(t.Context(), "../..", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	sh := testutil.NeedCommand(t, "sh", "dash")
	run := func(script string, limit time.Duration) (code int, out string, err error) {
		t.Helper()
		var b bytes.Buffer
		m := Machine{
			Kernel: kernel, Guest: guest, Program: sh, Args: []string{"-c", script}, Dir: "/some/where",
			Env: []string{"GREETING=good morning"}, Tools: DefaultTools, Modules: DefaultModules,
			Files: map[string]string{"/src/job": "job"}, Memory: 512, Timeout: limit, Output: &b, Log: testLog{t},
		}
		code, err = m.Run(t.Context())
		return code, b.String(), err
	}
	const patience = 3 * time.Minute

	code, out, err := run(`echo "$GREETING"; pwd; ls -1 /src/job/job.go /sys/module/veth/refcnt /sys/fs/cgroup/cgroup.procs
sleep 1 & read line </proc/sys/kernel/osrelease; echo $line; exit 7`, patience)
	if want := "good morning\n/some/where\n/src/job/job.go\n/sys/fs/cgroup/cgroup.procs\n/sys/module/veth/refcnt\n" + kernel.Release + "\n"; err != nil || code != 7 || out != want {
		t.Errorf("code %d, %v, output %q, want %q", code, err, out, want)
	}
	if code, out, err = run("echo before; kill -9 $$", patience); err != nil || code != 128+9 || out != "before\n" {
		t.Errorf("killed: code %d, %v, output %q", code, err, out)
	}
	if code, _, err = run("echo c >/proc/sysrq-trigger; sleep 100", patience); err == nil || errors.Is(err, ErrTime) || !strings.Contains(err.Error(), "the kernel died") || !strings.Contains(err.Error(), "sysrq") {
		t.Errorf("a kernel that died: code %d, %v", code, err)
	}
	if code, _, err = run("sleep 1000", 20*time.Second); !errors.Is(err, ErrTime) {
		t.Errorf("a program that hangs: code %d, %v", code, err)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	m := Machine{Kernel: kernel, Guest: guest, Program: sh}
	if code, err = m.Run(stopped); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: code %d, %v", code, err)
	}
	m.Modules = []string{"no-such-thing"}
	if code, err = m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "find module no_such_thing") {
		t.Errorf("without a module: code %d, %v", code, err)
	}
}

type testLog struct{ testing.TB }

func (l testLog) Write(b []byte) (int, error) {
	l.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}
