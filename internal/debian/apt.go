// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// listsAge is how old the package lists of a suite may be. Older ones are still used
// when the mirror cannot be reached.
const listsAge = 24 * time.Hour

// apt is apt with lists, a configuration and a status of our own: for it nothing is
// installed.
type apt struct {
	suite Suite
	dir   string
}

// options make apt-get, apt-cache use what is in the folder.
func (a apt) options() []string {
	var o []string
	for _, option := range []string{
		"Dir::Etc::sourcelist=" + filepath.Join(a.dir, "sources.list"),
		"Dir::Etc::sourceparts=-",
		"Dir::Etc::preferences=-",
		"Dir::Etc::preferencesparts=-",
		"Dir::State=" + filepath.Join(a.dir, "state"),
		"Dir::State::status=" + filepath.Join(a.dir, "state", "status"),
		"Dir::Cache=" + filepath.Join(a.dir, "cache"),
		"APT::Sandbox::User=root", // others may not enter the folder
		"APT::Install-Recommends=false",
		"APT::Update::Post-Invoke-Success::=true",
		"Acquire::Retries=3",
		"Acquire::Languages=none",
		"Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
		"Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false",
	} {
		o = append(o, "-o", option)
	}
	return append(o, "-qq")
}

// run runs a command of apt in the folder dir and returns what it prints.
func (a apt) run(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, append(a.options(), args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var out, messages bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &messages
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s (suite %s): %w: %s", name, args[0], a.suite, err, strings.TrimSpace(messages.String()))
	}
	return out.String(), nil
}

// withApt runs f with the lists of the suite, which are fetched where they are old.
// One process at a time does.
func (s *Store) withApt(ctx context.Context, suite Suite, f func(apt) error) error {
	key := filepath.Join("lists", string(suite))
	return s.locked(key, func() error {
		a := apt{suite: suite, dir: s.Path(key)}
		for _, dir := range []string{"state/lists/partial", "cache/archives/partial"} {
			if err := os.MkdirAll(filepath.Join(a.dir, dir), 0o755); err != nil {
				return err
			}
		}
		if err := s.update(ctx, a); err != nil {
			return err
		}
		return f(a)
	})
}

// update fetches the lists.
func (s *Store) update(ctx context.Context, a apt) error {
	done := filepath.Join(a.dir, "updated")
	info, err := os.Stat(done)
	switch {
	case err == nil && time.Since(info.ModTime()) < listsAge:
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	m, err := findMirror(ctx)
	if err != nil {
		return err
	}
	for name, text := range map[string]string{"sources.list": m.sources(a.suite), "state/status": ""} {
		if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintf(s.log, "fetching the package lists of Debian %s\n", a.suite)
	if _, err := a.run(ctx, a.dir, "apt-get", "update", "--error-on=any"); err != nil {
		if info == nil {
			return fmt.Errorf("fetch package lists: %w", err)
		}
		fmt.Fprintf(s.log, "going on with the lists of %s: %v\n", info.ModTime().Format(time.DateOnly), err)
		return nil
	}
	return os.WriteFile(done, nil, 0o644)
}

// Packages lists the names of the packages of a suite, sorted.
func (s *Store) Packages(ctx context.Context, suite Suite) (names []string, err error) {
	err = s.withApt(ctx, suite, func(a apt) error {
		out, err := a.run(ctx, a.dir, "apt-cache", "dumpavail")
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if name, ok := strings.CutPrefix(line, "Package: "); ok {
				names = append(names, strings.TrimSpace(name))
			}
		}
		return nil
	})
	slices.Sort(names)
	return slices.Compact(names), err
}

// Unpack fetches packages of the suite and unpacks them into the folder.
func (s *Store) Unpack(ctx context.Context, suite Suite, into string, packages ...string) error {
	return s.unpack(ctx, suite, into, func(a apt, debs string) error {
		_, err := a.run(ctx, debs, "apt-get", append([]string{"download"}, packages...)...)
		return err
	})
}

// UnpackAll is Unpack with everything that the packages depend on.
func (s *Store) UnpackAll(ctx context.Context, suite Suite, into string, packages ...string) error {
	return s.unpack(ctx, suite, into, func(a apt, debs string) error {
		_, err := a.run(ctx, debs, "apt-get", append([]string{
			"install", "--download-only", "--yes", "-o", "Dir::Cache::archives=" + debs,
			"-o", "APT::Keep-Downloaded-Packages=true", "-o", "APT::Get::AllowUnauthenticated=false",
		}, packages...)...)
		return err
	})
}

func (s *Store) unpack(ctx context.Context, suite Suite, into string, download func(a apt, debs string) error) error {
	debs, err := os.MkdirTemp(s.dir, "debs-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(debs) }()
	if err := os.Mkdir(filepath.Join(debs, "partial"), 0o755); err != nil {
		return err
	}
	if err := s.withApt(ctx, suite, func(a apt) error { return download(a, debs) }); err != nil {
		return fmt.Errorf("fetch packages: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("fetch packages: apt-get downloaded none from suite %s", suite)
	}
	// Which packages have the links of merged folders (/bin) has to come first, as
	// nothing can follow a link that is not there yet.
	slices.SortStableFunc(files, func(a, b string) int { return first(a) - first(b) })
	for _, file := range files {
		// dpkg-deb -x would replace such a link by a folder.
		script := `dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"`
		cmd := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", script, "unpack", file, into)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w: %s", filepath.Base(file), err, bytes.TrimSpace(out))
		}
	}
	return nil
}

func first(file string) int {
	if strings.HasPrefix(filepath.Base(file), "base-files_") {
		return 0
	}
	return 1
}
