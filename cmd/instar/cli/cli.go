// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// jsonVersion is the "version" of everything that --json prints. It grows when
// a field changes its meaning or goes; new fields do not change it.
const jsonVersion = 1

// app is one run of the command.
type app struct {
	env Env

	// started is set once the command line was understood: an error before
	// that is one of usage.
	started bool

	// root and json are the flags that several commands share.
	root string
	json bool
}

// Main runs the command and returns its exit code.
func Main(env Env) int {
	env.setDefaults()
	a := &app{env: env}
	root := a.command()
	root.SetArgs(append([]string{}, env.Args...))
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(env.Context)
	if err == nil {
		return exitOK
	}
	if !a.started {
		err = usagef("%w (see \"instar help\")", err)
	}
	if !errors.Is(err, errSilent) {
		fmt.Fprintf(env.Stderr, "instar: %s\n", oneLine(err))
	}
	return exitCode(err)
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "instar",
		Short: "Show and change groups of upgradable server sockets",
		Long: `Instar restarts and upgrades network servers with nothing lost. A group is the
sockets of one address; each process instance of the server holds one
generation of them, and exactly one generation is active: new flows go to it,
while flows of the others stay where they are until they end.

"instar demo" shows on real traffic what that is good for. It needs only root.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRun: func(*cobra.Command, []string) {
			a.started = true
		},
	}
	root.Version = newBuildJSON().text()
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().Bool("version", false, "print the version of this command") // without cobra's -v
	root.PersistentFlags().StringVar(&a.root, "root", a.env.Root,
		"`folder` on a bpffs below which groups are pinned")

	root.AddGroup(
		&cobra.Group{ID: "try", Title: "Try it:"},
		&cobra.Group{ID: "read", Title: "Look:"},
		&cobra.Group{ID: "change", Title: "Change:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("try", a.demoCommand())
	add("read", a.groupsCommand(), a.showCommand(), a.flowsCommand(), a.watchCommand(), a.traceCommand(), a.statusCommand(),
		a.doctorCommand(), a.metricsCommand(), a.versionCommand())
	add("change", a.runCommand(), a.upgradeCommand(), a.prepareCommand(), a.activateCommand(), a.rollbackCommand(), a.drainCommand(),
		a.forgetCommand(), a.programCommand())
	root.AddCommand(a.hiddenCommands()...)
	root.AddCommand(
		a.manCommand(),
		&cobra.Command{
			Use:   "exit-codes",
			Short: "What the exit code of a command means",
			Long:  exitCodesHelp,
		},
		&cobra.Command{
			Use:   "names",
			Short: "How a group is named on the command line",
			Long:  namesHelp,
		},
	)
	strictHelp(root)
	a.complete(root)
	return root
}

// strictHelp makes "help" refuse what is no command and no topic.
func strictHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, err := root.Find([]string{"help"})
	if err != nil {
		panic(err) // it was added above
	}
	show := help.Run
	help.RunE = func(cmd *cobra.Command, args []string) error {
		found, rest, err := root.Find(args)
		if err != nil {
			return err
		}
		if len(rest) > 0 {
			return usagef("help: unknown command or topic %q (see \"instar help\")", strings.TrimSpace(
				strings.TrimPrefix(found.CommandPath(), root.Name())+" "+rest[0]))
		}
		show(cmd, args)
		return nil
	}
}

// args checks the number of arguments and names what is missing.
func args(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		name := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
		if len(args) < len(names) {
			return fmt.Errorf("%s: missing %s", name, strings.Join(names[len(args):], " and "))
		}
		if len(args) > len(names) {
			return fmt.Errorf("%s: unexpected argument %q", name, args[len(names)])
		}
		return nil
	}
}

func (a *app) jsonFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON for programs, with a \"version\"")
}

// printJSON writes one document to the standard output.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.env.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}

// printf writes a line of outcome for people.
func (a *app) printf(format string, args ...any) {
	fmt.Fprintf(a.env.Stdout, format+"\n", args...)
}
