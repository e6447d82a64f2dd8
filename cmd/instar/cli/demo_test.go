// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/cmd/instar/demo"
	"instar/internal/testutil"
)

// TestDemoInterrupted checks that a demo that was ended early says what it
// measured, and that nothing is left of it: no process, no mount, no file.
func TestDemoInterrupted(t *testing.T) {
	testutil.NeedRoot(t)
	bin := commands(t)
	measured := regexp.MustCompile(`(?s)\n +failed requests +0\n.*\ninstar: interrupted after \d+\.\d s, (nothing lost|no request was served) until then\.\n$`)
	for name, signal := range map[string]unix.Signal{"INT": unix.SIGINT, "TERM": unix.SIGTERM, "KILL": unix.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			cwd, tmp := filepath.Join(dir, "cwd"), filepath.Join(dir, "tmp")
			if err := errors.Join(os.Mkdir(cwd, 0o700), os.Mkdir(tmp, 0o700)); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "instar"), "demo", "--connections", "10", "--rate", "5")
			cmd.Dir, cmd.Env = cwd, append(os.Environ(), "TMPDIR="+tmp)
			var stdout bytes.Buffer
			cmd.Stdout = &stdout
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines, last := bufio.NewScanner(stderr), ""
			for lines.Scan() {
				last = lines.Text()
				if strings.Contains(last, "serves") && len(processes(t, tmp)) == 2 {
					break
				}
			}
			if got := len(processes(t, tmp)); got != 2 {
				t.Errorf("%d processes of the demo, want the sandbox and a server: %s", got, last)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			for lines.Scan() {
				last = lines.Text()
			}
			_ = cmd.Wait()
			if signal != unix.SIGKILL {
				if got := cmd.ProcessState.ExitCode(); got != exitInterrupted || last != "instar: demo: interrupted" {
					t.Errorf("exit code %d, last line %q", got, last)
				}
				if !measured.Match(stdout.Bytes()) {
					t.Errorf("the table: %s", stdout.Bytes())
				}
			}
			// Nobody waits for the sandbox of a command that was killed.
			deadline := time.Now().Add(10 * time.Second)
			for time.Now().Before(deadline) && (len(processes(t, tmp)) > 0 || len(files(t, tmp)) > 0) {
				time.Sleep(10 * time.Millisecond)
			}
			if left := processes(t, tmp); len(left) > 0 {
				t.Errorf("processes left: %q", left)
			}
			if left := append(files(t, tmp), files(t, cwd)...); len(left) > 0 {
				t.Errorf("files left: %q", left)
			}
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(mounts, []byte(tmp)) {
				t.Errorf("mount left below %s", tmp)
			}
		})
	}
}

// processes lists the command lines that mention dir.
func processes(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, name := range names {
		if line, err := os.ReadFile(name); err == nil && bytes.Contains(line, []byte(dir)) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestProgress checks what is shown on a terminal and elsewhere.
func TestProgress(t *testing.T) {
	show := func(p *progress, out *bytes.Buffer) string {
		p.w = out
		p.event(demo.Event{Method: demo.MethodInstar, Text: "begins"})
		p.status(demo.Status{Method: demo.MethodInstar, At: time.Second, Of: 2 * time.Second, Active: 1, Servers: 1, Requests: 7})
		p.event(demo.Event{Method: demo.MethodInstar, At: 1200 * time.Millisecond, Text: "breaks", Bad: true})
		p.status(demo.Status{Method: demo.MethodInstar, At: 2 * time.Second, Of: 2 * time.Second, Active: 2, Servers: 2, Requests: 17, Failures: 1})
		p.clear()
		return out.String()
	}
	if got, want := show(&progress{}, new(bytes.Buffer)), "   0.0s  begins\n   1.2s  breaks\n"; got != want {
		t.Errorf("lines: %q, want %q", got, want)
	}
	live := show(&progress{live: true, colours: true, several: true}, new(bytes.Buffer))
	for _, want := range []string{
		"instar       0.0s  begins\n", "############------------ 1/2s", "\r\x1b[K\x1b[31minstar       1.2s  breaks\x1b[0m\n",
		"2 servers", "17 requests, 10/s", "1 lost",
	} {
		if !strings.Contains(live, want) {
			t.Errorf("no %q in %q", want, live)
		}
	}
	if !strings.HasSuffix(live, "\r\x1b[K") {
		t.Errorf("the live line stays: %q", live)
	}
}

// TestPageFile checks the ways in which a page is written.
func TestPageFile(t *testing.T) {
	report := &demo.Report{Runs: []demo.Result{{Method: demo.MethodInstar}}}
	path := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := probePage(path); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("the probe changed the page to %q, %v", got, err)
	}
	if err := writePage(path, report); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(got, []byte("<!DOCTYPE html>")) {
		t.Errorf("page: %.20q, %v", got, err)
	}
	if names := files(t, filepath.Dir(path)); len(names) != 1 {
		t.Errorf("files: %q", names)
	}
	if err := errors.Join(probePage("/dev/null"), writePage("/dev/null", report), probePage("")); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]int{t.TempDir(): 2, filepath.Join(path, "x.html"): 3, "/no/such/folder/x.html": 3, "/proc/x.html": 3} {
		if err := probePage(name); exitCode(err) != want {
			t.Errorf("probePage(%q): %v", name, err)
		}
	}
}
