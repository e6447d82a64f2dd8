// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path"
	"strings"
)

// Suite names a part of the archive: "trixie", "trixie-backports",
// "trixie-security".
type Suite string

// security says whether the suite is in the archive of security updates, which has an
// address of its own.
func (s Suite) security() bool { return strings.HasSuffix(string(s), "-security") }

// mirror is where the machine's apt gets its packages.
type mirror struct {
	archive  string
	security string
}

// targetFormat makes apt-get indextargets print what parseTargets reads.
const targetFormat = "$(RELEASE) $(REPO_URI)"

// findMirror asks apt for its configuration.
func findMirror(ctx context.Context) (mirror, error) {
	cmd := exec.CommandContext(ctx, "apt-get", "indextargets", "--no-release-info", "--format", targetFormat, "Created-By: Packages")
	out, err := cmd.Output()
	if err != nil {
		return mirror{}, fmt.Errorf("read configuration of apt: %w", withStderr(err))
	}
	return parseTargets(string(out))
}

// parseTargets reads lines of targetFormat.
func parseTargets(lines string) (mirror, error) {
	var m mirror
	for line := range strings.Lines(lines) {
		release, uri, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		into := &m.archive
		if Suite(release).security() {
			into = &m.security
		}
		if *into == "" {
			*into = uri
		}
	}
	if m.archive == "" {
		return mirror{}, errors.New("read configuration of apt: it names no mirror of Debian; add one to /etc/apt/sources.list.d")
	}
	if m.security == "" {
		// Mirrors that have both have them side by side.
		u, err := url.Parse(m.archive)
		if err != nil {
			return mirror{}, fmt.Errorf("read configuration of apt: %w", err)
		}
		u.Path = path.Join(path.Dir(path.Clean(u.Path)), "debian-security") + "/"
		m.security = u.String()
	}
	return m, nil
}

// keyring is what the packages of all releases are signed with. apt looks through its
// own keys where it is not installed.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// sources is the line of a sources.list for the suite.
func (m mirror) sources(s Suite) string {
	uri, option := m.archive, ""
	if s.security() {
		uri = m.security
	}
	if _, err := os.Stat(keyring); err == nil {
		option = "[signed-by=" + keyring + "] "
	}
	return fmt.Sprintf("deb %s%s %s main\n", option, uri, s)
}

// withStderr adds what a command printed to its error.
func withStderr(err error) error {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if text := strings.TrimSpace(string(exit.Stderr)); text != "" {
			return fmt.Errorf("%w: %s", err, text)
		}
	}
	return err
}
