// SPDX-License-Identifier: Apache-2.0

// Package systemd has example units. This test has systemd read them.
package systemd

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// newer are complaints of a systemd before 253 that are no fault of the units.
var newer = []*regexp.Regexp{
	regexp.MustCompile(`^app-reload\.service:\d+: Failed to parse service type, ignoring: notify-reload$`),
	regexp.MustCompile(`^app-reload\.service:\d+: Unknown key( name)? 'ReloadSignal' in section ('Service'|\[Service\]), ignoring\.$`),
}

// verify returns what systemd-analyze says about the units in dir.
func verify(t *testing.T, dir string, units []string) []string {
	t.Helper()
	analyze := testutil.NeedCommand(t, "systemd-analyze", "systemd")
	var complaints []string
	for _, unit := range units {
		cmd := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", filepath.Join(dir, unit))
		// The units here come before those of the machine.
		cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+dir+":", "LC_ALL=C", "SYSTEMD_COLORS=0")
		out, err := cmd.CombinedOutput()
		for line := range strings.Lines(string(out)) {
			// Of other units of the machine it may say what it likes.
			line = strings.TrimPrefix(strings.TrimSpace(line), dir+"/")
			if strings.HasPrefix(line, "app") && !slices.Contains(complaints, line) &&
				!slices.ContainsFunc(newer, func(r *regexp.Regexp) bool { return r.MatchString(line) }) {
				complaints = append(complaints, line)
			}
		}
		if err != nil && len(complaints) == 0 {
			complaints = append(complaints, unit+": "+err.Error()+": "+string(out))
		}
	}
	return complaints
}

// install copies the units with programs that exist on every machine.
func install(t *testing.T, edit func(name string, content []byte) []byte) (dir string, units []string) {
	t.Helper()
	dir = t.TempDir()
	for _, pattern := range []string{"*.socket", "*.service"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		units = append(units, files...)
	}
	programs := regexp.MustCompile(`/usr/local/bin/(app|instar)\b`)
	for _, name := range units {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		content = edit(name, programs.ReplaceAll(content, []byte("/bin/true")))
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, units
}

func TestUnits(t *testing.T) {
	dir, units := install(t, func(_ string, content []byte) []byte { return content })
	if want := []string{"app-udp.socket", "app.socket", "app-reload.service", "app.service"}; !slices.Equal(units, want) {
		t.Fatalf("units %q, want %q", units, want)
	}
	for _, complaint := range verify(t, dir, units) {
		t.Error(complaint)
	}
}

// The check would find a mistake.
func TestUnitsWithMistakes(t *testing.T) {
	for _, tc := range []struct{ unit, from, to, want string }{
		{"app.service", "NotifyAccess=main", "NotifyAccess=mine", "notify access"},
		{"app-reload.service", "KillMode=", "KillMod=", "KillMod"},
		{"app.socket", "ListenStream=443", "ListenStream=x", "ListenStream"},
		{"app-udp.socket", "Service=app.service", "Service=", "app-udp"},
	} {
		dir, units := install(t, func(name string, content []byte) []byte {
			if name == tc.unit {
				changed := bytes.Replace(content, []byte("\n"+tc.from), []byte("\n"+tc.to), 1)
				if bytes.Equal(changed, content) {
					t.Fatalf("%s has no %s", name, tc.from)
				}
				return changed
			}
			return content
		})
		complaints := strings.Join(verify(t, dir, units), "\n")
		if !strings.Contains(complaints, tc.want) {
			t.Errorf("%s with %s: %q, want %q", tc.unit, tc.to, complaints, tc.want)
		}
	}
}

// The signal variant differs in how it is reloaded, and in nothing else.
func TestVariantsAgree(t *testing.T) {
	settings := func(name string) []string {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for line := range strings.Lines(string(content)) {
			line = strings.TrimSpace(line)
			variable, _, _ := strings.Cut(line, "=")
			if line == "" || line[0] == '#' || slices.Contains([]string{"Type", "ExecReload", "ReloadSignal", "Description"}, variable) {
				continue
			}
			list = append(list, line)
		}
		return list
	}
	a, b := settings("app.service"), settings("app-reload.service")
	if !slices.Equal(a, b) {
		t.Errorf("app.service has\n%s\napp-reload.service has\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
	}
}
